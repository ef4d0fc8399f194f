"""The project itself: pages, words, imports, package, notebooks, tools."""
