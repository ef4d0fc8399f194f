"""Speculative decoding: what guesses the next tokens, and what a step does with guesses."""
