"""Decode on Mosaic GPU: sequences with 1 to 8 query tokens."""
