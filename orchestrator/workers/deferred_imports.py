"""Import math_verify only when something is verified. Must be imported before verifiers.

verifiers imports it at its start, and it imports sympy: a quarter of the CPU time of `import verifiers.v1` (2.8 of
10.6 s), in every worker and every plan, for environments that score no mathematics.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_NAME = "math_verify"


class _DeferredModule(ModuleType):
    """Stands for the module until an attribute is called or, but for the two functions, read."""

    def __getattr__(self, name: str) -> Any:
        if name in ("parse", "verify"):
            return lambda *values, **named: getattr(_load(), name)(*values, **named)
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(), name)


def _load() -> ModuleType:
    if isinstance(sys.modules.get(_NAME), _DeferredModule):
        del sys.modules[_NAME]
    return importlib.import_module(_NAME)


def defer() -> None:
    """Put the stand-in where `import math_verify` finds it, unless the module is loaded or absent."""
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is not None:
        stand_in = _DeferredModule(_NAME)
        stand_in.__path__ = list(spec.submodule_search_locations or ())  # math_verify.errors costs nothing.
        stand_in.__spec__ = spec  # find_spec raises ValueError for a module without one.
        sys.modules[_NAME] = stand_in


defer()
