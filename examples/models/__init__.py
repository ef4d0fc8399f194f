"""Models in flax nnx that keep their keys and values in jattn's paged caches."""
