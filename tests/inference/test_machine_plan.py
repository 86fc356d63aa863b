"""Which nodes a machine gets, and why it gets none: numbers in, plan or error out."""

import re
from dataclasses import replace

import pytest

from composer_prime.config.inference import InferenceConfig, VllmEngineConfig
from composer_prime.errors import ConfigError
from inference.joining import NodeSetup, machine_text, plan_nodes, this_setup

HERE = NodeSetup(cores=32, gpus=0, has_nvidia=False, driver="", torch_cuda="13.0", vllm_is_installed=True)


def on_gpus(count: int, driver: str = "13.0", **changes) -> NodeSetup:
    return replace(HERE, gpus=count, driver=driver, **changes)


def plan(
    here: NodeSetup, *, engine: str | None = None, each: int = 1, **wanted
) -> tuple[str, int, list[tuple[int, ...]]]:
    return plan_nodes(InferenceConfig(vllm=VllmEngineConfig(tensor_parallel=each), **wanted), engine, here)


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
    chosen, threads, shares = plan(on_gpus(gpus, vllm_is_installed=vllm), each=each)
    assert [len(share) for share in shares] == [gpus_each] * nodes and chosen == engine
    taken = [index for share in shares for index in share]
    assert taken == sorted(set(taken))
    assert threads == 32 // nodes


@pytest.mark.parametrize(
    ("here", "options", "part"),
    [
        (on_gpus(1), {"each": 2}, "--tensor-parallel is 2"),
        (on_gpus(1, driver="11.8"), {}, "driver knows CUDA 11.8, the torch here needs 13.0"),
        (on_gpus(1, torch_cuda=""), {}, "built without CUDA"),
        (HERE, {"device": "cuda"}, "no GPU is visible here"),
        (replace(HERE, has_nvidia=True), {}, "--gpus all"),
        (on_gpus(1, vllm_is_installed=False), {"engine": "vllm"}, "vllm is not installed"),
    ],
)
def test_what_cannot_run_here_is_refused(here, options, part):
    with pytest.raises(ConfigError, match=part):
        plan(here, **options)


def test_device_cpu_leaves_gpus_alone():
    assert plan(on_gpus(8, driver="11.8", vllm_is_installed=False), device="cpu") == ("local", 32, [()])


def test_this_machine_can_be_looked_at(tmp_path):
    assert this_setup().cores >= 1
    assert re.search(r" cores, [\d.]+ GiB memory, [\d.]+ GiB disk$", machine_text(tmp_path / "not" / "there" / "yet"))
