"""Published weights: names, hashes, signature, canary; final/; adapters merged; bad stores."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from small_runs import make_samples, rows_of
from test_step import SETTINGS
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_prime.errors import CheckpointError, WeightError
from composer_prime.packing.pack import totals
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import CHUNK_BYTES, WeightStore, open_signed
from inference.receiver import FolderSource, VersionFolder
from inference.snapshot import word_sum
from trainer.model.build import build_policy
from trainer.optim import build_optimizer
from trainer.train import train_step
from trainer.weights.publish import Publisher, export, safetensors_parts


def train_once(run, model_folder, world):
    policy = build_policy(run.config, model_folder, world)
    optimizer = build_optimizer(policy, run.config.trainer.optim)
    samples = make_samples(1, 6)
    for step in (1, 2):
        train_step(policy, optimizer, rows_of(samples, world.device), totals(samples), SETTINGS, step=step)
    return policy


def publish(run, folder, world, policy, *versions: int) -> Publisher:
    publisher = Publisher(run.config, run.dir, "run", folder, world, None)
    for version in versions:
        assert publisher.publish(policy, version) > 0
    publisher.settle()
    return publisher


def published(run, version: int, folder: Path | None = None):
    """(manifest, tensors) of a version, checked as a node checks it; `folder` has the base of adapters."""
    store = WeightStore(run.dir.weights)
    manifest = open_signed(store.manifest(version), RunKeys(run.dir.keys).verifier(), run_id="run")
    received = VersionFolder(FolderSource(store), folder or run.dir.root)
    tensors = dict(asyncio.run(received.fetch(manifest)))
    received.close()
    if manifest.kind != "adapters":
        assert manifest.tensors == {name: f"{word_sum(tensor):x}" for name, tensor in tensors.items()}
    return manifest, tensors


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from composer_prime.run.weights import WeightStore
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
WeightStore(Path(sys.argv[1])).put_chunks(b"half a chunk")
"""


@pytest.mark.process
def test_a_killed_trainer_s_partial_files_are_removed_at_the_next_start(make_run, model_folder, world):
    # kill -9 while a chunk is written leaves a partial file; the next trainer of the run removes it.
    run = make_run()
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, str(run.dir.weights)]
    assert subprocess.run(command).returncode == -9
    [left] = (run.dir.weights / "chunks").iterdir()
    assert left.name.endswith(".partial")
    Publisher(run.config, run.dir, "run", model_folder, world, None)
    assert list((run.dir.weights / "chunks").iterdir()) == []


def logprobs(lm, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        scores = lm(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(1, torch.tensor(ids)[1:, None]).squeeze(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_published_version_is_the_policy(make_run, model_folder, world, dtype, lora):
    # Names are the model folder's, hashes and signature hold, and transformers with the published tensors in float32
    # gives the canary's logprobs to 1e-5; they differ from the start model's. Adapters are merged.
    run = make_run(inference={"dtype": dtype}, trainer={"lora": lora, "optim": {"lr": 1e-2}})
    policy = train_once(run, model_folder, world)
    publish(run, model_folder, world, policy, 3)
    manifest, tensors = published(run, 3, model_folder)
    assert manifest.kind == ("anchor" if lora is None else "adapters")
    start = load_file(model_folder / "model.safetensors")
    assert tensors.keys() == start.keys() == manifest.tensors.keys() and manifest.dtype == dtype
    assert all(tensor.dtype == getattr(torch, dtype) for tensor in tensors.values())
    lm = AutoModelForCausalLM.from_pretrained(model_folder)
    before = logprobs(lm, manifest.canary.token_ids)
    lm.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    after = logprobs(lm, manifest.canary.token_ids)
    assert (after - torch.tensor(manifest.canary.logprobs)).abs().max() < 1e-5
    assert (after - before).abs().max() > 1e-3
    assert len(manifest.canary.logprobs) == len(manifest.canary.token_ids) - 1 >= 1


def test_old_versions_are_pruned_and_a_rewind_drops_later_ones(make_run, model_folder, world):
    # Only the newest `keep` versions stay, with their chunks; after rewind(4) nothing later is left.
    run = make_run(trainer={"weights": {"keep": 2}})
    policy = build_policy(run.config, model_folder, world)
    publisher = publish(run, model_folder, world, policy, *range(3, 7))
    store = WeightStore(run.dir.weights)
    assert store.versions() == [5, 6]
    publisher.rewind(5)
    assert store.versions() == [5]
    published(run, 5)


def test_training_goes_on_while_a_version_is_published(make_run, model_folder, world):
    # `publish` returns while the version is written; what training changes then is not in it. It is announced when it
    # is complete, on another thread, and the next publication waits for that.
    run = make_run(inference={"dtype": "float32"})
    policy = build_policy(run.config, model_folder, world)
    before = {name: parameter.full_tensor().clone() for name, parameter in policy.lm.named_parameters()}
    publisher = Publisher(run.config, run.dir, "run", model_folder, world, None)
    trained, announced = threading.Event(), []

    def announce(version: int) -> None:
        assert trained.wait(60)
        announced.append((version, published(run, version)[0].version, threading.current_thread().name))

    publisher.publish(policy, 1, announce)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    assert announced == []
    trained.set()
    publisher.publish(policy, 2, announce)
    publisher.settle()
    assert announced == [(1, 1, "publication"), (2, 2, "publication")]
    for name, tensor in published(run, 1)[1].items():
        assert torch.equal(tensor, before[name]) and not published(run, 2)[1][name].any()


def test_an_unexpected_failure_of_the_thread_is_said(make_run, model_folder, world):
    # Whatever ends the thread is an error of ours: rank 0 says it, and so do the ranks that wait for it.
    run = make_run()
    publisher = Publisher(run.config, run.dir, "run", model_folder, world, None)

    def announce(_: int) -> None:
        raise RuntimeError("no memory")

    publisher.publish(build_policy(run.config, model_folder, world), 1, announce)
    with pytest.raises(WeightError, match="publication of policy version 1 failed: RuntimeError: no memory"):
        publisher.settle()
    with pytest.raises(WeightError):
        publisher.background.is_idle()


def test_a_run_that_leaves_announces_nothing_more(make_run, model_folder, world):
    # `close` ends an announcement that nobody answers, without an error.
    run = make_run()
    publisher = Publisher(run.config, run.dir, "run", model_folder, world, None)

    def announce(_: int) -> None:
        while not publisher.background.is_closing():
            time.sleep(0.01)

    publisher.publish(build_policy(run.config, model_folder, world), 1, announce)
    publisher.background.close()
    publisher.background.check()


def test_a_store_that_cannot_be_written_is_a_clear_error(make_run, model_folder, world):
    # weights/ is a file: the error names version, path and remedy.
    run = make_run()
    policy = build_policy(run.config, model_folder, world)
    publisher = Publisher(run.config, run.dir, "run", model_folder, world, None)
    run.dir.weights.write_text("in the way")
    publisher.publish(policy, 1, announce=lambda _: pytest.fail("a version that is not there was announced"))
    with pytest.raises(WeightError, match=r"policy version 1 .* cannot be written to .*weights.*free some space"):
        publisher.publish(policy, 2)
    with pytest.raises(WeightError):
        publisher.background.check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_final_loads_with_transformers(make_run, model_folder, world, tmp_path, dtype):
    # final/ loads by path alone: model in the published type, tokenizer, chat template; logits are the policy's.
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}!")
    run = make_run(model={"chat_template": str(template)}, trainer={"optim": {"lr": 1e-2}})
    policy = train_once(run, model_folder, world)
    export(policy, run.config, model_folder, run.dir.final, world, getattr(torch, dtype))
    lm = AutoModelForCausalLM.from_pretrained(run.dir.final, dtype="auto")
    assert lm.dtype == getattr(torch, dtype)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(run.dir.final)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"
    for name, parameter in policy.lm.named_parameters():
        assert torch.equal(lm.get_parameter(name), parameter.full_tensor().to(lm.dtype))


def test_final_that_cannot_be_written_is_a_clear_error(make_run, model_folder, world):
    # The parent of final/ is a file: CheckpointError names the path; nothing half-written stays.
    run = make_run()
    policy = build_policy(run.config, model_folder, world)
    (run.dir.root / "blocked").write_text("")
    with pytest.raises(CheckpointError, match=r"final model cannot be written to .*blocked"):
        export(policy, run.config, model_folder, run.dir.root / "blocked" / "final", world, torch.float32)


def test_the_stream_is_a_safetensors_file(tmp_path):
    # Pieces written one by one, over chunk borders, join to a file that safetensors reads back bit for bit.
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(2, 2, 2), "d": torch.ones(0, 4)}
    whole = b"".join(bytes(part) for part in safetensors_parts(tensors))
    read = load(whole)
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
    store = WeightStore(tmp_path)
    one, other = store.put_chunks(whole), store.put_stream(safetensors_parts(tensors))
    assert one == other and b"".join(store.chunk(ref.sha256, 0, ref.size) for ref in one) == whole
    parts = [whole[:10], b"", whole[10:11], whole[11:]] * (2 * CHUNK_BYTES // len(whole))
    assert store.put_stream(parts) == store.put_chunks(b"".join(parts)) and len(store.put_stream(parts)) == 2
