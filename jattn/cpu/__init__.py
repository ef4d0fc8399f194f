"""The implementations for CPUs."""
