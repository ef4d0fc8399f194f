"""`paged_attention`, `update_kv_cache` and their formats, in every implementation."""
