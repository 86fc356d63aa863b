"""What a patch file says of two versions, and when there is none."""

from __future__ import annotations

import math

import pytest
import torch

from inference.engines.vllm.patch_file import INDICES, VALUES, save_patch
from inference.snapshot import Snapshot, save_snapshot

BASE = {"a": (3000, 1000), "b": (7,), "none": (0, 4)}  # the first is read in two blocks


def versions(tmp_path, share: float, dtype: torch.dtype = torch.bfloat16) -> tuple[Snapshot, dict[str, torch.Tensor]]:
    """Return a version on the disk, and the tensors of one in which `share` of the values are others."""
    random = torch.Generator().manual_seed(0)
    old = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in BASE.items()}
    moved = {name: torch.rand(tensor.shape, generator=random) < share for name, tensor in old.items()}
    save_snapshot(old, tmp_path / "old")
    new = {name: torch.where(moved[name], -tensor, tensor) for name, tensor in old.items()}
    return Snapshot("old", [[(tmp_path / "old", (tmp_path / "old").stat().st_size)]]), new


def on_disk(tmp_path, tensors: dict[str, torch.Tensor], name: str = "new") -> Snapshot:
    save_snapshot(tensors, tmp_path / name)
    return Snapshot(name, [[(tmp_path / name, (tmp_path / name).stat().st_size)]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_patch_leads_to_the_new_version_bit_for_bit(tmp_path, dtype):
    # Positions and values alone make the new tensors, also over a zero that only changed its sign.
    old, new = versions(tmp_path, 0.05, dtype)
    new["b"][0] = -0.0
    old = on_disk(tmp_path, {**dict(old), "b": torch.zeros_like(new["b"])}, "zeros")
    assert save_patch(old, on_disk(tmp_path, new), tmp_path / "patch")
    size = (tmp_path / "patch").stat().st_size
    patch = Snapshot("patch", [[(tmp_path / "patch", size)]])
    for name, tensor in new.items():
        patched = old[name].reshape(-1)
        patched[patch[name + INDICES].long()] = patch[name + VALUES]
        words = torch.int16 if dtype.itemsize == 2 else torch.int32
        assert torch.equal(patched.view(words), tensor.reshape(-1).view(words))
    whole = sum(math.prod(shape) for shape in BASE.values()) * dtype.itemsize
    assert size < 0.06 * (4 + dtype.itemsize) / dtype.itemsize * whole


def test_equal_versions_make_an_empty_patch(tmp_path):
    # A step that changed nothing is a patch without values.
    old, new = versions(tmp_path, 0.0)
    assert save_patch(old, on_disk(tmp_path, new), tmp_path / "patch")
    assert (tmp_path / "patch").stat().st_size < 2000


def test_what_is_no_small_change_is_told_whole(tmp_path):
    # More than a third of the values, another type, names or shapes, NaN, or old tensors that are gone: no patch.
    old, new = versions(tmp_path, 0.01)
    many = versions(tmp_path, 0.4)[1]
    wrong = [
        many,
        {**new, "b": new["b"].float()},
        {name: tensor for name, tensor in new.items() if name != "b"},
        {**new, "b": new["b"][:-1]},
        {**new, "b": new["b"] * math.nan},
        {**new, "b": new["b"].short()},
    ]
    for tensors in wrong:
        assert not save_patch(old, on_disk(tmp_path, tensors), tmp_path / "patch")
    assert save_patch(old, on_disk(tmp_path, new), tmp_path / "patch")
    (tmp_path / "old").unlink()
    assert not save_patch(old, on_disk(tmp_path, new), tmp_path / "patch")
