"""The native CPU kernel: its library, numbers, writes and saved programs."""
