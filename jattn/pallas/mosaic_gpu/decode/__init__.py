"""Decode of 1 to 8 query tokens a sequence, with split KV and the merge of its splits."""
