"""The task sets that ship. Each imports without verifiers, because its plugin class is imported on first use."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def on_first_use(package: str, name: str, module: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for the module `package` that takes `name` from its submodule `module`."""

    def get(attribute: str) -> Any:
        if attribute != name:
            raise AttributeError(f"module {package!r} has no attribute {attribute!r}")
        return getattr(import_module(f"{package}.{module}"), name)

    return get
