"""Disaggregated prefill: prompts that another server reads, and whose cache contents move here."""
