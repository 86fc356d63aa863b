"""torch at its first use: the settings of loss terms are read in processes that never load it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class _Torch:
    """Stands for the module; each name is looked up once."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module("torch"), name)
        setattr(self, name, value)
        return value


torch: Any = _Torch()


def without_gradient(function: Function) -> Function:
    """Let `function` compute under torch.no_grad."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]
