"""The `local` engine: continuous batching on transformers, for laptops, CI and many-node tests.

local_engine.py      async surface (read first)        slots.py    owners of KV slots, prefixes; what a step computes
compute.py           the compute thread                loading.py  the model in memory, new weights
cached_attention.py  the KV cache and its attention

The rule of drawing is in inference/engines/sampling.py: an auditor checks it.
"""
