"""The example engine: scheduling, prefix cache, drafts, adapters, several devices."""
