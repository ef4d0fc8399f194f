"""The native kernel in separate processes: random cases, sanitizers, batches, other machines."""
