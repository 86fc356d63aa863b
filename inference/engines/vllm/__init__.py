"""The vLLM engine: vLLM's own engine core in a child process, driven over a private socket pair.

Read engine.py first: it is what a node holds. process.py starts and ends the child, messages.py is what the two say to
each other, server.py is the child's loop, options.py its settings, worker_extension.py puts new weights in place.

Why not vLLM's HTTP server: its administrative routes (collective_rpc, pause) take no key and amount to code execution
for anyone who reaches the port, loopback included; a swap between two steps of the engine's own loop needs no pause and
labels every token exactly; and on a CPU, tokens/s are higher without HTTP and the hop to a second process.
"""
