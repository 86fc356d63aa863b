"""Checkpoints hold what is trained, and load where a parameter has no moments."""

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from small_runs import make_samples, rows_of
from torch.distributed.checkpoint.state_dict import get_state_dict

from composer_prime import host
from composer_prime.errors import CheckpointError
from composer_prime.packing.pack import totals
from composer_prime.wire.types import CheckpointSaved
from trainer.model.build import build_policy
from trainer.model.policy_model import SelfTeacher
from trainer.optim import build_optimizer
from trainer.train import train_step
from trainer.weights.checkpoint import Checkpoints


class SavingOrchestrator:
    """Answers each request for a checkpoint; `pipe`: what the trainer's part of it blocks on, if anything."""

    def __init__(self, pipe: Path | None = None):
        self.pipe = pipe

    def checkpoint(self, step: int) -> CheckpointSaved:
        if self.pipe is not None:
            self.pipe.parent.mkdir(parents=True)
            os.mkfifo(self.pipe)
        return CheckpointSaved(step=step)


@pytest.fixture
def multimodal_folder(tmp_path):
    """A random Gemma 3 with a vision tower."""
    torch.manual_seed(0)
    text = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, image_token_index=95, mm_tokens_per_image=4
    )
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def trained(run, folder, world, *, thaw: str | None = None, offloads: bool = False):
    """A policy after one step, and its checkpoints; `thaw`: let the parameters with this in their name be trained."""
    policy = build_policy(run.config, folder, world)
    for name, parameter in policy.named_parameters():
        if thaw is not None and thaw in name:
            parameter.requires_grad_(True)
    optimizer = build_optimizer(policy, run.config.trainer.optim, offloads=offloads)
    samples = make_samples(1)
    settings = run.config.channels.terms(32)
    train_step(policy, optimizer, rows_of(samples, world.device), totals(samples), settings, step=1)
    teacher = SelfTeacher(policy, run.config.channels)
    checkpoints = Checkpoints(
        run_dir=run.dir, world=world, policy=policy, optimizer=optimizer, teacher=teacher, outer=None, keep=2
    )
    return policy, optimizer, checkpoints


def moments(policy, optimizer) -> dict[str, torch.Tensor]:
    states = optimizer.parts[0].state
    return {name: states[p]["exp_avg"].full_tensor() for name, p in policy.named_parameters() if states.get(p)}


@pytest.mark.parametrize("thaw", [None, "vision_tower"], ids=["frozen", "without moments"])
def test_a_checkpoint_with_parameters_that_text_never_reaches(make_run, multimodal_folder, world, thaw):
    # A vision tower is frozen when the policy is built, so a checkpoint of one step loads. So does that of a run which
    # trained the tower's parameters, though they never got moments.
    run = make_run()
    policy, optimizer, checkpoints = trained(run, multimodal_folder, world, thaw=thaw)
    frozen = [name for name, parameter in policy.named_parameters() if not parameter.requires_grad]
    assert all("vision_tower" in name or "multi_modal_projector" in name for name in frozen) and frozen
    checkpoints.save(1, SavingOrchestrator())
    before = moments(policy, optimizer)
    checkpoints.load(1)
    after = moments(policy, optimizer)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_of_adapters_has_no_frozen_base(make_run, model_folder, world):
    run = make_run(trainer={"lora": {"rank": 2}})
    policy, _, checkpoints = trained(run, model_folder, world)
    checkpoints.save(1, SavingOrchestrator())
    written = dcp.FileSystemReader(run.dir.checkpoint(1) / "trainer").read_metadata().state_dict_metadata
    model = [name for name in written if name.startswith("model.")]
    assert model and all(".lora_" in name for name in model)
    state = {name: parameter.full_tensor().clone() for name, parameter in policy.named_parameters()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0 if parameter.requires_grad else 0.0)
    checkpoints.load(1)
    assert all(torch.equal(parameter.full_tensor(), state[name]) for name, parameter in policy.named_parameters())


def test_an_older_checkpoint_with_the_frozen_base_is_loaded(make_run, model_folder, world):
    run = make_run(trainer={"lora": {"rank": 2}})
    policy, optimizer, checkpoints = trained(run, model_folder, world)
    model, of_optimizer = get_state_dict(policy, optimizer.parts)
    assert any("base_layer" in name for name in model)
    state = {"model": model, "optimizer": of_optimizer, "meta": {"step": 1, "format": 1}}
    dcp.save(state, checkpoint_id=run.dir.checkpoint(1) / "trainer")
    (run.dir.checkpoint(1) / "COMPLETE").touch()
    adapters = {name: p.full_tensor().clone() for name, p in policy.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0 if parameter.requires_grad else 0.0)
    checkpoints.load(1)
    assert all(torch.equal(dict(policy.named_parameters())[name].full_tensor(), adapters[name]) for name in adapters)


@pytest.mark.parametrize("offloads", [True, False])
def test_a_checkpoint_does_not_fix_settings(make_run, model_folder, world, offloads):
    # Moments on the host have one optimizer a block: one of the whole model loads its checkpoint, and the other way
    # round. So does a run with another weight decay, which keeps it.
    run = make_run(trainer={"optim": {"type": "muon"}})
    policy, optimizer, checkpoints = trained(run, model_folder, world, offloads=offloads)
    checkpoints.save(1, SavingOrchestrator())
    written = get_state_dict(policy, optimizer.parts)[1]["state"]
    resumed = make_run(trainer={"optim": {"type": "muon", "weight_decay": 0.3}})
    policy, optimizer, checkpoints = trained(resumed, model_folder, world, offloads=not offloads)
    train_step(policy, optimizer, rows_of(make_samples(2), world.device), totals(make_samples(2)),
               run.config.channels.terms(32), step=2)  # fmt: skip
    checkpoints.load(1)
    state = get_state_dict(policy, optimizer.parts)[1]["state"]
    assert all(torch.equal(value, state[name][key]) for name in written for key, value in written[name].items())
    assert {group["weight_decay"] for group in optimizer.groups()} == {0.0, 0.3}


def test_the_thread_that_writes_has_the_device_of_its_rank(make_run, model_folder, world, monkeypatch):
    # Another thread's current device is GPU 0, and torch waits for that one's copies: rank 1 may write too soon.
    run, set_on = make_run(), []
    monkeypatch.setattr(torch.cpu, "set_device", lambda device: set_on.append((device, threading.current_thread())))
    _, _, checkpoints = trained(run, model_folder, world)
    checkpoints.save(1, SavingOrchestrator())
    ((device, thread),) = set_on
    assert device == world.device and thread is not threading.main_thread()


def test_a_container_without_room_for_a_copy(make_run, model_folder, world, monkeypatch, tmp_path):
    # The limit of the control group counts, not the memory of the machine; what it holds of unused files is free.
    _, _, checkpoints = trained(make_run(), model_folder, world)
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "cgroup")
    for name, text in (("current", "900"), ("stat", "anon 500\ninactive_file 300\n"), ("max", "max")):
        (tmp_path / "cgroup" / f"memory.{name}").write_text(text)
    assert checkpoints._has_room()
    (tmp_path / "cgroup" / "memory.max").write_text("1000")
    assert host.memory() == (1000, 400) and not checkpoints._has_room()


def test_a_checkpoint_is_written_beside_training(make_run, model_folder, world):
    # While checkpoint 2 is written, the parameters change and 1 stays whole. A failed write is told, and only it goes.
    # The next one has the parameters of its own moment, and is followed by no trace of the oldest.
    run = make_run()
    policy, _, checkpoints = trained(run, model_folder, world)
    checkpoints.save(1, SavingOrchestrator())
    pipe = run.dir.checkpoint(2) / "trainer" / "__0_0.distcp"
    checkpoints.begin(2, SavingOrchestrator(pipe))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    assert run.dir.complete_checkpoints() == [1] and run.dir.checkpoint(2).exists()
    pipe.read_bytes()
    failure = checkpoints.settle()
    assert isinstance(failure, CheckpointError) and str(run.dir.checkpoint(2)) in str(failure)
    assert run.dir.complete_checkpoints() == [1] and not run.dir.checkpoint(2).exists()
    state = {name: parameter.full_tensor().clone() for name, parameter in policy.named_parameters()}
    for step in (3, 4):
        checkpoints.begin(step, SavingOrchestrator())
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1.0)
    assert checkpoints.settle() is None and run.dir.complete_checkpoints() == [3, 4]
    checkpoints.load(3)
    assert all(torch.equal(parameter.full_tensor(), state[name]) for name, parameter in policy.named_parameters())
