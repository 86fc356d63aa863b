"""Versions without a snapshot: after a resume of the trainer, and from the model folder."""

from __future__ import annotations

import contextlib

import pytest
import safetensors.torch

from inference.versions import FolderSource, VersionFolder
from tests.inference.test_versions import Training, fetch, size_of


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path / "weights")


@pytest.fixture
def open_node(training, tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(VersionFolder(FolderSource(training.store), tmp_path)))


# After a resume the next version is what differs from the newest one before: who has that one pulls no snapshot, and
# neither does who joined earlier and has the anchor. Later versions and anchors come as ever.
@pytest.mark.parametrize("checkpoint", [3, 5])
def test_a_resume_needs_no_snapshot(training, open_node, checkpoint):
    follower, behind = open_node(), open_node()
    training.train(range(5))
    fetch(behind, training, 4)
    training.train(range(5, 6))
    fetch(follower, training, 5)
    training.restart()
    training.writer.continue_from(training.written[5][0], checkpoint)
    training.store.rewind(checkpoint)
    training.tensors = {name: tensor.clone() for name, tensor in training.written[checkpoint][1].items()}
    manifest = training.publish(checkpoint)
    assert manifest.kind == "delta" and manifest.chunks == training.written[4][0].chunks
    for node in (follower, behind):
        assert fetch(node, training, checkpoint) < size_of(manifest.chunks) / 3
    for version in range(checkpoint + 1, 9):
        manifest = training.train(range(version, version + 1))
        for node in (follower, behind):
            assert fetch(node, training, version) == manifest.deltas[-1].size
    assert {manifest.kind for manifest, _ in training.written.values()} == {"anchor", "delta"}


# What the store lost cannot be built on: the next version is whole.
def test_a_resume_on_a_damaged_store_is_whole(training, open_node):
    training.train(range(2))
    training.restart()
    (training.store.root / "chunks" / training.written[1][0].chunks[0].sha256).unlink()
    training.writer.continue_from(training.written[1][0], 1)
    assert training.train(range(2, 3)).kind == "anchor"
    fetch(open_node(), training, 2)


# Version 0 is the model folder: a node makes the anchor from its own copy, in whatever order and type that is stored,
# and pulls what differs. A folder of other weights does not help, and does not harm.
@pytest.mark.parametrize("folder", ["same", "float32", "other"])
def test_the_model_folder_is_the_first_anchor(training, tmp_path, folder):
    stored = {name: training.tensors[name].clone() for name in sorted(training.tensors, reverse=True)}
    if folder == "float32":
        stored = {name: tensor.float() for name, tensor in stored.items()}
    elif folder == "other":
        stored["up"][0, 0] += 1
    (tmp_path / "model").mkdir()
    safetensors.torch.save_file(stored, tmp_path / "model" / "model.safetensors")
    training.publish(0)
    manifest = training.train(range(1, 2))
    with contextlib.closing(VersionFolder(FolderSource(training.store), tmp_path / "model")) as node:
        pulled = fetch(node, training, 1)
        assert (pulled == size_of(manifest.overlay)) == (folder != "other")
        training.train(range(2, 3))
        assert fetch(node, training, 2) == training.written[2][0].deltas[-1].size
