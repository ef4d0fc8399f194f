"""Prefill, chunked prefill and mixtures."""
