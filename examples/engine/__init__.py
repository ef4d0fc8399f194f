"""A small serving engine on jattn: continuous batching, prefix caching, hybrid models, HTTP."""
