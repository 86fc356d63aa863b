"""Open a box of the kind that a runtime table names.

bubblewrap     isolated: no host files, no network, own processes, limits
subprocess     limits only; it isolates nothing
module:Class   one of the user's own
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
    """Return the class of a kind of box. Raises ConfigError where there is none."""
    if ":" not in kind and kind not in SANDBOXES:
        raise ConfigError(
            f"orchestrator.source.runtime.type is {kind!r}, which only programs of harnesses can have: what opens its "
            "own sandboxes, such as coding tasks, has 'bubblewrap', 'subprocess' and `module:Class`"
        )
    module, _, name = SANDBOXES.get(kind, kind).partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"orchestrator.source.runtime.type {kind!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Box)):
        raise ConfigError(
            f"orchestrator.source.runtime.type {kind!r} is no class of orchestrator.coding.sandbox.box.Box"
        )
    return found
