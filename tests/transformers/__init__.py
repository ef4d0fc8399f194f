"""Unmodified transformers models on jattn."""
