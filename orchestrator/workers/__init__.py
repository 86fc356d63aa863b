"""Environment workers: verifiers environments in processes of their own.

    pool      a source's workers: dispatch, restart with backoff, cancellation
    players   the handle on each worker process, and what it shares with hosts elsewhere
    hosts     the address at which hosts of workers join, and the handle on each
    join      such a host: `orchestrator join`
    protocol  the messages between pool and worker, as length-prefixed msgpack over a socket pair
    worker    the process: one source's environments, many concurrent rollouts on one event loop

Only the worker process imports verifiers (verifiers_adapter, verifiers_compat), so the orchestrator's own process stays
free of it.

Why not verifiers' own environment server (verifiers.v1.serve)? It streams whole traces with token ids to its client,
which the gateway's record makes needless. It neither notices a silent worker nor restarts one. CPU of a rollout on one
core, worker + orchestrator, for one turn and for three turns: 12.8 + 2.1 ms and 34.1 + 2.7 ms there, 2.2 + 0.1 ms and
7.6 + 0.5 ms here.
"""

from orchestrator.workers import deferred_imports as deferred_imports
