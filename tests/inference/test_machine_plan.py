"""Which nodes a machine gets, and why it gets none: numbers in, plan or error out."""

from __future__ import annotations

import pytest

from composer_prime.config.inference import InferenceConfig, VllmEngineConfig
from composer_prime.console import GIB
from composer_prime.errors import ConfigError
from inference.joining import NodeMachine, NodeShare, find_machine, plan_nodes


def machine(gpus: int = 0, driver: str = "13.0") -> NodeMachine:
    return NodeMachine(
        gpus=[80 * GIB] * gpus, driver=driver if gpus else "", memory=64 * GIB, disk=1, cores=32,
    )  # fmt: skip


def plan(found: NodeMachine, *, engine: str | None = None, vllm: bool = True, cuda: str = "13.0",
         has_nvidia: bool = False, each: int = 1, **wanted) -> list[NodeShare]:  # fmt: skip
    config = InferenceConfig(vllm=VllmEngineConfig(tensor_parallel=each), **wanted)
    return plan_nodes(found, config, engine, vllm_is_installed=vllm, torch_cuda=cuda, has_nvidia=has_nvidia)


@pytest.mark.parametrize(
    ("gpus", "each", "vllm", "nodes", "gpus_each", "engine"),
    [
        (8, 1, True, 8, 1, "vllm"),  # one a GPU
        (8, 4, True, 2, 4, "vllm"),
        (1, 1, False, 1, 1, "local"),  # vllm is not installed
        (2, 2, False, 2, 1, "local"),  # which does not split a model
        (0, 1, True, 1, 0, "local"),  # no GPU: one node on the CPU
        (3, 2, True, 1, 2, "vllm"),  # the third is left
    ],
)
def test_a_node_takes_the_gpus_that_it_was_given(gpus, each, vllm, nodes, gpus_each, engine):
    shares = plan(machine(gpus), each=each, vllm=vllm)
    assert [len(share.gpus) for share in shares] == [gpus_each] * nodes
    assert {share.engine for share in shares} == {engine}
    taken = [index for share in shares for index in share.gpus]
    assert taken == sorted(set(taken))
    assert shares[0].threads == 32 // nodes


@pytest.mark.parametrize(
    ("found", "options", "part"),
    [
        (machine(1), {"each": 2}, "--tensor-parallel is 2"),
        (machine(1, driver="11.8"), {}, "driver knows CUDA 11.8, the torch here needs 13.0"),
        (machine(1), {"cuda": ""}, "built without CUDA"),
        (machine(0), {"device": "cuda"}, "no GPU is visible here"),
        (machine(0), {"has_nvidia": True}, "--gpus all"),
        (machine(1), {"engine": "vllm", "vllm": False}, "vllm is not installed"),
    ],
)
def test_what_cannot_run_here_is_refused(found, options, part):
    with pytest.raises(ConfigError, match=part):
        plan(found, **options)


def test_device_cpu_leaves_gpus_alone():
    [share] = plan(machine(8, driver="11.8"), device="cpu", vllm=False)
    assert share.gpus == () and share.engine == "local"


def test_this_machine_can_be_looked_at(tmp_path):
    found = find_machine(tmp_path / "not" / "there" / "yet")
    assert found.cores >= 1 and found.memory > 0 and found.disk > 0 and "cores" in str(found)
