"""The `local` engine: continuous batching on transformers, for laptops, CI and many-node tests.

local_engine.py      async surface (read first)        scheduling.py   which request computes what in a step
compute.py           the compute thread                slots.py        owners of KV slots, prefixes
cached_attention.py  attention over the slot cache     kv_cache.py     the slot cache's tensors
loading.py           load the model, swap weights      given.py        check given tokens

The rule of drawing is in inference/engines/sampling.py: an auditor checks it.
"""
