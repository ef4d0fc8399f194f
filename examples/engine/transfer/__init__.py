"""Prompts that another server has read: asked for, taken out of its caches, put into these."""
