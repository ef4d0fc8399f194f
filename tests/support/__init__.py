"""What tests share: workloads, budgets, wrong kernels, interpreters."""
