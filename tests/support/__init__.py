"""Shared by the tests: workloads, budgets, wrong kernels, interpreters."""
