"""vLLM's worker as it is on a GPU, for a CPU: linear layers compute with the weights that were loaded, not packed ones.

TEST_WORKER/held.safetensors   written at each read-back: all parameters
TEST_WORKER/patches            one byte for each patch that was begun
TEST_WORKER/break              while it is there, a patch fails in its middle
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import safetensors.torch
import torch
from vllm.model_executor.layers import utils

from inference.engines.vllm.rank_sums import Held
from inference.engines.vllm.worker_extension import NodeWorker


def _compute_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = _compute_plain


class PlainWorker(NodeWorker):
    """Named in `--worker-extension-cls`."""

    def patch_from_file(self, path: str, shapes: dict[str, list[int]]) -> None:
        folder = Path(os.environ["TEST_WORKER"])
        with (folder / "patches").open("a") as file:
            file.write("+")
        if (folder / "break").exists():
            super().patch_from_file(path, dict(itertools.islice(shapes.items(), len(shapes) // 2)))
            raise OSError("broken off")
        super().patch_from_file(path, shapes)

    def read_parameters(self, names: list[str]) -> list[Held]:
        model = self.model_runner.get_model()
        held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        safetensors.torch.save_file(held, Path(os.environ["TEST_WORKER"]) / "held.safetensors")
        return super().read_parameters(names)
