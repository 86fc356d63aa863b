"""What a new version costs a node: whole, compressed, XOR with the version before, and as this project sends it.

    uv run python -m benchmarks.weight_sync                    # a tiny model
    uv run python -m benchmarks.weight_sync --model smollm2    # SmolLM2-135M

Real AdamW steps on float32 masters; each version is published in bfloat16 by trainer/weights/publish.py and
brought to a node's disk by inference/receiver.py, which must give back the same bits. Of the last step:

    full        the file in bfloat16
    zstd        the file, level 3
    xor + zstd  file XOR file of the version before, level 3
    patch       what a node pulls that has the anchor (the first version); beside it `full` for one that has nothing

`node memory` is the peak of a process that takes the last version and reads all tensors, over that before, in sizes of
the snapshot. `pause` is what sampling waits for: reading all tensors through the patch into those in use, against a
copy in memory. What the training step waits for is in benchmarks/publication_stall.py. With --cut every so many reads
of the node break off and are taken up again; --steps 200 --cut 7 is the long test of bits. Every version is compared
bit for bit, and one that differs ends the benchmark with an error.

The exit status is 1 when the patch of one step is more than 1/100 of the whole at a learning rate of 1e-6 or 1/30 at
1e-5, or when the node's process grows by more than 1.3 snapshots (but not with the tiny model, whose snapshot is
smaller than what a process takes anyway).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import msgspec
import torch
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks._shared import conclude, peak_bytes, reset_peak
from composer_prime.errors import DeadlineError
from composer_prime.model_source import resolve_model
from composer_prime.run.weights import Canary, Manifest, WeightStore
from inference.receiver import ChunkSource, FolderSource, VersionFolder
from inference.snapshot import Snapshot
from trainer.weights.publish import VersionWriter

Tensors = dict[str, torch.Tensor]
LEAST_RATIOS = {1e-6: 100.0, 1e-5: 30.0}
"""The whole over the patch of one step, by learning rate."""
MEMORY_TARGET = 1.3
_BLOCK = 1 << 24
"""Elements that are made or compared at a time."""


def trained(lm: torch.nn.Module, ids: torch.Tensor, lr: float) -> Iterator[Tensors]:
    """Yield the float32 masters before the first step and after each one."""
    optimizer = torch.optim.AdamW(lm.parameters(), lr=lr, betas=(0.9, 0.95))
    batches = ids.split(128)
    step = 0
    while True:
        yield {name: parameter.detach() for name, parameter in lm.named_parameters()}
        batch = batches[step % len(batches)][None]
        optimizer.zero_grad()
        lm(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        step += 1


def small_model() -> Iterator[tuple[torch.nn.Module, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    while True:
        torch.manual_seed(0)
        yield LlamaForCausalLM(config), torch.randint(0, 2048, (1024,))


def smollm2() -> Iterator[tuple[torch.nn.Module, torch.Tensor]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("smollm2")
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])[:1024]
    while True:
        yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ids


class Breaking(ChunkSource):
    """A source of which every so many reads break off, in the middle of a chunk."""

    def __init__(self, store: WeightStore, every: int) -> None:
        """`every` = 0 never breaks off."""
        self.inner, self.every, self.reads, self.broken = FolderSource(store), every, 0, 0

    async def read(self, sha256: str, offset: int) -> bytes | None:
        self.reads += 1
        if self.every and self.reads % self.every == 0:
            self.broken += 1
            raise DeadlineError("broken off")
        piece = await self.inner.read(sha256, offset)
        return piece[: 1 + len(piece) // 2] if piece and self.every else piece


def described(version: int) -> Manifest:
    return Manifest(
        run_id="sync", version=version, kind="anchor", dtype="bfloat16", chunks=[], tensors={},
        canary=Canary(token_ids=[0, 1], logprobs=[0.0]),
    )  # fmt: skip


def brought(node: VersionFolder, manifest: Manifest) -> Snapshot:
    """Bring a version to the node's disk, however often the source breaks off."""
    while True:
        try:
            return asyncio.run(node.fetch(manifest))
        except DeadlineError:
            continue


def measure(versions: Iterator[Tensors], steps: int, folder: Path, cut: int) -> dict[str, float]:
    store = WeightStore(folder / "weights")
    writer = VersionWriter(store, Ed25519PrivateKey.generate(), "benchmark", keep=3, anchor_every=steps + 2)
    source = Breaking(store, cut)
    node = VersionFolder(source, folder)
    figures: dict[str, float] = {}
    last: Snapshot | None = None
    for step in range(steps + 1):
        masters = next(versions)
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in masters.items()}
        start = time.perf_counter()
        manifest = writer.write(described(step), tensors)
        encode_s = time.perf_counter() - start
        store.put_manifest(step, msgspec.msgpack.encode(manifest))
        start, pulled = time.perf_counter(), node.bytes_pulled
        snapshot = brought(node, manifest)
        apply_s = time.perf_counter() - start
        if step == 1:
            figures["first"] = sum(ref.size for ref in manifest.patch)
        if step == steps and last is not None:
            figures |= _sizes(last, tensors)
        node.settle(manifest)
        last = snapshot
        wrong = [n for n, t in tensors.items() if not torch.equal(snapshot[n].view(torch.int16), t.view(torch.int16))]
        if wrong:
            raise SystemExit(f"version {step} came out different in {wrong[:5]}")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    figures |= {"pause": _copy_s(snapshot, shapes), "copy": _copy_s(tensors, shapes), "broken": source.broken}
    node.close()
    return figures | {
        "patch": node.bytes_pulled - pulled,
        "encode": encode_s,
        "apply": apply_s,
        "memory": _node_memory(folder, steps),
    }


def verdicts(model: str, lr: float, of: dict[str, float]) -> list[tuple[str, bool]]:
    """Return each aim beside what was measured, in words, and whether it is met."""
    answers, name = [], f"{model}, lr {lr:g}"
    if least := LEAST_RATIOS.get(lr):
        ratio = of["full"] / of["first"] if of["first"] else 1.0
        answers.append((f"{name}: patch of a step 1 : {ratio:.0f}, at least 1 : {least:.0f}", ratio >= least))
    if model != "tiny":
        grown = of["memory"] / of["full"]
        answers.append((f"{name}: node memory {grown:.2f} snapshots, at most {MEMORY_TARGET}", grown <= MEMORY_TARGET))
    return answers


def _sizes(old: Snapshot, new: Tensors) -> dict[str, float]:
    """Return the sizes of `new`, whole and compressed, and of what differs from `old`, without holding either."""
    whole, xored = (zstandard.ZstdCompressor(level=3).compressobj() for _ in range(2))
    full = zstd = xor_zstd = changed = 0
    for name, tensor in new.items():
        flat = tensor.reshape(-1).view(torch.int16)
        for offset, before in old.blocks(name, _BLOCK):
            words = flat[offset : offset + before.numel()]
            difference = words ^ before.reshape(-1).view(torch.int16)
            changed += int(difference.count_nonzero())
            full += words.nbytes
            zstd += len(whole.compress(words.numpy().data))
            xor_zstd += len(xored.compress(difference.numpy().data))
    return {
        "changed": 100 * changed / (full / 2),
        "full": full,
        "zstd": zstd + len(whole.flush()),
        "xor + zstd": xor_zstd + len(xored.flush()),
    }


def _copy_s(source: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> float:
    """Return the seconds that it takes to read `source` tensor by tensor into memory in use."""
    in_use = torch.zeros(max(map(prod, shapes.values())), dtype=torch.bfloat16)
    start = time.perf_counter()
    for name, shape in shapes.items():
        in_use[: prod(shape)].view(shape).copy_(source[name])
    return time.perf_counter() - start


def _node_memory(folder: Path, last: int) -> int:
    """Return the bytes that a node's process grows by at its peak while it takes the last version."""
    command = [sys.executable, "-m", "benchmarks.weight_sync", "--node", str(folder), "--steps", str(last)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600)
    return json.loads(done.stdout)


def take_last_version(folder: Path, last: int) -> None:
    store = WeightStore(folder / "weights")
    node = VersionFolder(FolderSource(store), folder)
    for version in (last - 1, last):
        manifest = msgspec.msgpack.decode(store.manifest(version), type=Manifest)
        if version == last:
            reset_peak()
            before = peak_bytes()
        for name in (snapshot := asyncio.run(node.fetch(manifest))):
            for _ in snapshot.blocks(name):
                pass
        node.settle(manifest)
    print(peak_bytes() - before)
    node.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="tiny")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cut", type=int, default=0, metavar="N", help="break off every Nth read of the node; 0: none")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--quick", action="store_true", help="two steps of the tiny model: whether it works")
    parser.add_argument("--node", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.model, options.steps, options.lr = "tiny", 2, [1e-5]
    torch.set_num_threads(1)
    if options.node is not None:
        take_last_version(options.node, options.steps)
        return 0
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: the last version is compared with the one before it, give 1 or more")
    if options.cut == 1:
        parser.error("--cut 1: every read would break off, give 2 or more")
    models = smollm2() if options.model == "smollm2" else small_model()
    answers = []
    for lr in options.lr:
        with tempfile.TemporaryDirectory() as name:
            versions = trained(*next(models), lr)
            of = measure(versions, options.steps, Path(name), options.cut)
        print(f"{options.model}, lr {lr:g}, step {options.steps}: {of['changed']:.2f} % of the values changed, "
              f"load {os.getloadavg()[0]:.0f}")  # fmt: skip
        for way in ("full", "zstd", "xor + zstd", "patch"):
            ratio = of["full"] / of[way] if of[way] else 0
            print(
                f"  {way:11} {of[way] / 1e6:9.3f} MB" + (f"   1 : {ratio:.0f}" if ratio else "   none: written whole")
            )
        print(f"  {options.steps + 1} versions bit for bit, {of['broken']:.0f} reads broken off; node memory "
              f"{of['memory'] / 1e6:.1f} MB, {of['memory'] / of['full']:.2f} snapshots")  # fmt: skip
        print(f"  pause {of['pause']:.2f} s, a copy in memory {of['copy']:.2f} s")
        print(f"  encode {of['encode']:.2f} s, pull and apply {of['apply']:.2f} s", flush=True)
        answers += verdicts(options.model, lr, of)
    return conclude(answers, is_quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
