"""Commands for those who work on jattn: `python -m tests.tools.NAME`."""
