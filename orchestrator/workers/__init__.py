"""Environment workers: verifiers environments in processes of their own.

    pool      a source's workers: messages, dispatch, restart with backoff, cancellation
    worker    the process: one source's environments, many concurrent rollouts

Only the worker process imports verifiers (verifiers_adapter). docs/decisions/index.md says why not its own server.
"""
