"""[orchestrator.source.runtime]: where the code of a source runs, and its limits."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from composer_prime.import_path import PartConfig, check_names

SANDBOX_TYPES = ("auto", "bubblewrap", "subprocess", "docker", "podman", "apptainer", "modal", "e2b", "prime")


class SandboxLimits(BaseConfig):
    """Limits of one sandbox. A command that exceeds one is ended; this is a result, not a failure."""

    wall_s: float = Field(default=60.0, gt=0)
    """Wall-clock seconds of one command."""
    cpu_s: int = Field(default=60, ge=1)
    """CPU seconds of one command, over all its processes. A harness's program has no such limit."""
    memory_gb: float = Field(default=1.0, gt=0)
    """Memory in GiB: address space of each process, and total resident memory."""
    processes: int = Field(default=64, ge=1)
    """Concurrent processes and threads."""
    file_mb: ClassVar[float] = 64.0
    """Size of one file in MiB."""
    disk_mb: float = Field(default=256.0, gt=0)
    """Total size of the files in the work folder, in MiB; /tmp has the same limit."""
    files: int = Field(default=20_000, ge=1)
    """Number of files and folders in the work folder; /tmp has the same limit."""
    output_kb: ClassVar[float] = 256.0
    """Output of a command to keep, in KiB of stdout and of stderr. Longer output is cut in the middle."""
    output_mb: ClassVar[float] = 16.0
    """Output in MiB at which a command is ended."""


class RuntimeConfig(BaseConfig):
    """The place where the code of a source runs."""

    type: str = "auto"
    """bubblewrap isolates with Linux namespaces; subprocess isolates nothing; auto is bubblewrap for sources that
    execute code, else subprocess. `module:Class` is a sandbox of your own. docker, podman, apptainer, modal, e2b
    and prime are verifiers' runtimes for programs of harnesses, not for coding tasks."""
    limits: SandboxLimits = SandboxLimits()
    """Limits of one sandbox."""
    packages: list[str] = []
    """Installed distributions to add to the sandbox's Python besides pytest, with their dependencies."""
    settings: dict[str, Any] = {}
    """Settings of a verifiers runtime, such as `image` for docker, or of your own class."""

    @model_validator(mode="after")
    def _known_type(self) -> RuntimeConfig:
        of_verifiers = SANDBOX_TYPES[SANDBOX_TYPES.index("docker") :]
        part = PartConfig(name=self.type, settings={} if self.type in of_verifiers else self.settings)
        check_names([part], SANDBOX_TYPES, "orchestrator.source.runtime.type")
        return self
