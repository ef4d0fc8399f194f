"""Block tables as values: append, gather, expand, slots, context parallelism."""
