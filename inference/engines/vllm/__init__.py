"""The vLLM engine: vLLM's own engine core in a child process, driven over a private socket pair.

    vllm_engine.py  the node's side (read first), and what the two exchange    core.py  the child: vLLM and its loop
    worker_extension.py  draws tokens, takes new weights

Why not vLLM's HTTP server: its administrative routes (collective_rpc, pause) need no key and let anyone who reaches the
port execute code, also on loopback. A swap between two steps of the engine's own loop needs no pause and labels every
token exactly. On a CPU, tokens/s are higher without HTTP and a second process.
"""
