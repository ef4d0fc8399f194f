"""The engine behind HTTP: clients, failures, replicas."""
