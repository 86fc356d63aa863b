"""Environment workers: verifiers environments in processes of their own.

    pool      a source's workers: messages, dispatch, restart with backoff, cancellation
    worker    the process: one source's environments, many concurrent rollouts

Only the worker process imports verifiers (verifiers_adapter). docs/decisions/index.md says why not its own server.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_NAME = "math_verify"


def _defer_math_verify() -> None:
    """Import math_verify only when something is verified, unless it is loaded already or absent.

    verifiers imports it at its start, and it imports sympy: a quarter of the CPU time of `import verifiers.v1` (2.8 of
    10.6 s), in every worker and every plan, for environments that score no mathematics.
    """
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is None:
        return
    stand_in = ModuleType(_NAME)

    def attribute(name: str) -> Any:
        if name in ("parse", "verify"):
            return lambda *values, **named: attribute_of_real(name)(*values, **named)
        if name.startswith("__"):
            raise AttributeError(name)
        return attribute_of_real(name)

    def attribute_of_real(name: str) -> Any:
        if sys.modules.get(_NAME) is stand_in:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)

    stand_in.__path__ = list(spec.submodule_search_locations or ())  # math_verify.errors costs nothing.
    stand_in.__spec__ = spec  # find_spec raises ValueError for a module without one.
    stand_in.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules[_NAME] = stand_in


_defer_math_verify()
