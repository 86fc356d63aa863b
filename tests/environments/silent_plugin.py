"""A harness that ends without asking the model."""

from typing import Any

import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["SilentHarness"]


class SilentHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, *args: Any, **kwargs: Any) -> ProgramResult:
        return ProgramResult(exit_code=0, stdout="", stderr="")
