"""Speculative decoding: proposers of draft tokens, and how a step verifies them."""
