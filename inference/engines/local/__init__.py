"""The `local` engine: continuous batching on transformers, for laptops, CI and many-node tests.

engine.py     async surface (read first)        scheduling.py   which request computes what in a step
compute.py    the thread that computes          slots.py        who holds which KV slot, prefix look-up
attention.py  attention over the slot cache     kv_cache.py     the slot cache's tensors
sampling.py   warp, draw, log-probabilities     stopping.py     when a completion ends
loading.py    model folder in, weights swapped  request.py      one request's state
"""
