"""A small serving stack on jattn: blocks, a scheduler that shares them out, and the step loop."""
