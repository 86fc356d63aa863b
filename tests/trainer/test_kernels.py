"""The head's kernels: the choice, what is refused, and kernels that build for GPUs that are not here."""

from __future__ import annotations

import logging

import pytest
import torch

from composer_prime.errors import ConfigError
from trainer.head.kernel_choice import choose_kernels

SIGNATURES = {
    "statistics_kernel": {"logits": "*T", "targets": "*i64", "temperature": "*fp32", "logprob": "*T", "entropy": "*T",
                          "log_sum": "*T", "stride": "i64", "vocabulary": "i32"},
    "gradient_kernel": {"logits": "*T", "targets": "*i64", "temperature": "*fp32", "log_sum": "*T", "entropy": "*T",
                        "logprob_grad": "*T", "entropy_grad": "*T", "divergence_grad": "*T", "stride": "i64",
                        "vocabulary": "i32", "pieces": "i32"},
}  # fmt: skip
CONSTANTS = {"statistics_kernel": {"BLOCK": 4096}, "gradient_kernel": {"BLOCK": 4096, "SCALE": 0.7, "CAP": 30.0}}
OPTIONAL = {"temperature", "entropy_grad", "divergence_grad", "CAP"}


def test_the_cpu_takes_torch():
    # auto measures nothing without a GPU; triton on the CPU is refused with both values and the remedy.
    hidden = torch.zeros(1, 4)
    assert choose_kernels("auto", hidden, 19).name == choose_kernels("torch", hidden, 19).name == "torch"
    with pytest.raises(ConfigError, match=r"head_kernels is 'triton', but .* (on cpu|not installed).*'auto'"):
        choose_kernels("triton", hidden, 19)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", ["fp32", "fp64"])
@pytest.mark.parametrize("kernel", [*SIGNATURES])
@pytest.mark.parametrize("optional", [True, False])
def test_kernels_build_for_gpus(kernel, kind, capability, optional):
    # Triton compiles each kernel to machine code of Ampere and Hopper, with every optional input and with none; no GPU
    # is needed for it. (What the code computes is tested in the interpreter, and natively where there is a GPU.)
    pytest.importorskip("triton")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trainer.head import triton_kernels

    constants = dict(CONSTANTS[kernel])
    signature = {name: written.replace("T", kind) for name, written in SIGNATURES[kernel].items()}
    if not optional:
        constants |= dict.fromkeys(OPTIONAL & (signature.keys() | constants.keys()))
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=getattr(triton_kernels, kernel), signature=signature, constexprs=constants)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    assert len(built.asm["cubin"]) > 1000


@pytest.mark.gpu
def test_the_faster_kernels_are_chosen_once(caplog):
    # On CUDA, auto times both at the first call for a kind of logits and logs the result; the second call is silent.
    hidden = torch.zeros(1, 4, device="cuda", dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO, logger="trainer.head.kernel_choice"):
        first, second = choose_kernels("auto", hidden, 50257), choose_kernels("auto", hidden, 50257)
    assert first is second and len(caplog.records) == 1
    assert first.name in caplog.text and "ms in torch" in caplog.text and "ms in Triton" in caplog.text
