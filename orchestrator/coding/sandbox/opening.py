"""Open a box of the kind that a runtime table names.

bubblewrap   isolated: no host files, no network, own processes, limits
subprocess   limits only; it isolates nothing
module:Class one of the user's own
docker, podman, modal, ...   one of verifiers' runtimes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import ConfigError
from orchestrator.coding.sandbox.box import NO_FILES, Box

SANDBOXES = {
    "auto": "orchestrator.coding.sandbox.bubblewrap:BubblewrapBox",
    "bubblewrap": "orchestrator.coding.sandbox.bubblewrap:BubblewrapBox",
    "subprocess": "orchestrator.coding.sandbox.subprocess_box:SubprocessBox",
}
"""Short name -> class. The module of each is imported on first use."""
_VERIFIERS = "orchestrator.coding.sandbox.runtime:RuntimeBox"


async def open_box(
    runtime: RuntimeConfig,
    *,
    tree: Path | None = None,
    files: Mapping[str, bytes] = NO_FILES,
    python_path: Sequence[str] = (),
) -> Box:
    """Open a box whose work folder holds a copy of `tree`, and `files`.

    `python_path`: folders below the work folder that become PYTHONPATH. Raises SandboxError with the remedy,
    ConfigError for a kind that cannot be imported.
    """
    box = await box_class(runtime.type).open(runtime, tuple(python_path))
    try:
        await box.fill(tree, files)
        return box
    except BaseException:
        await box.close()
        raise


def box_class(kind: str) -> type[Box]:
    """Return the class of a kind of box. Raises ConfigError where it cannot be imported."""
    path = kind if ":" in kind else SANDBOXES.get(kind, _VERIFIERS)
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"orchestrator.source.runtime.type {kind!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Box)):
        raise ConfigError(
            f"orchestrator.source.runtime.type {kind!r} is no class of orchestrator.coding.sandbox.box.Box"
        )
    return found
