"""The worker of vLLM as it is on a GPU, for a CPU: linear layers compute with loaded weights, not with packed ones."""

import torch
from vllm.model_executor.layers import utils

from inference.engines.vllm.worker_extension import NodeWorker


def _compute_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = _compute_plain


class PlainWorker(NodeWorker):
    """Named in `--worker-extension-cls`."""
