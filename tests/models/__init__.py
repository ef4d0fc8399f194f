"""The example models and their matrix products, compared with references."""
