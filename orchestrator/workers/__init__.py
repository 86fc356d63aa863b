"""Environment workers: verifiers environments in processes of their own.

    protocol   the messages, and what a source tells its workers
    frames     length-prefixed msgpack over a socket pair
    worker     the process: one source's environments, many concurrent rollouts on one event loop
    child      the orchestrator's handle on one such process
    pool       a source's workers: dispatch, restart with backoff, cancellation
    cpu        each rollout's share of a worker's CPU time

Only `worker` imports verifiers, so the orchestrator's own process stays free of it.

Why not verifiers' own environment server (verifiers.v1.serve): it streams whole traces with token ids to its client,
which the gateway's record makes needless, and it neither notices a silent worker nor restarts one. CPU of a rollout on
one core, worker + orchestrator, single-turn and three turns: 12.8 + 2.1 ms and 34.1 + 2.7 ms there, 2.2 + 0.1 ms and
7.6 + 0.5 ms here.
"""
