"""The engine behind HTTP, with OpenAI's API."""
