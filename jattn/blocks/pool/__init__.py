"""Pools of blocks: which are free, which hold a known prefix, and how their contents move."""
