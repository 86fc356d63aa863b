"""Environment workers: verifiers environments in processes of their own.

    protocol   the messages, and what a source tells its workers
    frames     length-prefixed msgpack over a socket pair
    worker     the process: one environment, many concurrent rollouts on one event loop
    child      the orchestrator's handle on one such process
    pool       a source's workers: dispatch, restart with backoff, cancellation

Only `worker` imports verifiers, so the orchestrator's own process stays free of it.
"""
