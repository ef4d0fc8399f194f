"""The engine behind HTTP, in the shapes of OpenAI's API."""
