"""C++ called by XLA through its foreign function interface: the fast path on CPUs."""
