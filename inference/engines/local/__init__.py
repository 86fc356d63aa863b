"""The `local` engine: continuous batching on transformers, for laptops, CI and many-node tests.

local_engine.py  async surface (read first), compute thread    loading.py  the model in memory, new weights
cache.py         KV slots, what a step computes, attention

The rule of drawing is in inference/engines/sampling.py: an auditor checks it.
"""
