"""The example engine: scheduling, prefix cache, speculative decoding, adapters, devices."""
