"""The native kernel in processes of its own: random cases, sanitizers, batches, other machines."""
