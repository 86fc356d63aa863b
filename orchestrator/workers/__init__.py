"""Environment workers: verifiers environments in processes of their own.

    pool      a source's workers: dispatch, restart with backoff, cancellation
    worker_process   the handle on each worker process
    protocol  the messages between pool and worker, as length-prefixed msgpack over a socket pair
    worker    the process: one source's environments, many concurrent rollouts on one event loop

Only the worker process imports verifiers (verifiers_adapter, verifiers_compat), so the orchestrator's own process stays
free of it.

Why not verifiers' own environment server (verifiers.v1.serve)? See docs/decisions/index.md.
"""

from orchestrator.workers import deferred_imports as deferred_imports
