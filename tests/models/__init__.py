"""The example models against their references, and their products."""
