"""Integer planning before tracing: block sizes, page alignment, groups and plans."""
