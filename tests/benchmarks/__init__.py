"""The benchmarks, and the results and pages that they write."""
