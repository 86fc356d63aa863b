"""The peak memory of a node at its second install, over the size of the snapshot: tensor by tensor against whole.

    uv run python benchmarks/install_memory.py

Model: SmolLM2-135M's shape, random float32 weights (a CPU's type), 538 MB; the local engine. Each side runs in a
process of its own and installs two versions from a weight store on this disk. The figure is the peak of the resident
memory during the second install over that of the node when it serves the model folder, plus the engine's own weights,
which are 1.

    whole      chunks in memory, joined, parsed into tensors, and those of the version before kept for a way back:
               what inference/receiver.py did until it kept weights on the disk
    streamed   inference/receiver.py

The exit status is 1 when the streamed peak is more than 1.3 snapshots above the engine's own weights.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from composer_prime.config.inference import InferenceConfig, LocalEngineConfig
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import Canary, Manifest, WeightStore, open_signed, sign
from inference.engines.local.engine import LocalEngine
from inference.receiver import Receiver
from inference.versions import FolderSource

SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
TARGET = 2.3
"""The engine's own weights and 1.3 snapshots."""
CANARY_IDS = list(range(5, 37))


def prepare(root: Path) -> None:
    """Write the model folder and versions 1 and 2 of it."""
    from safetensors.torch import load_file, save
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(root / "model")
    store, signer = WeightStore(root / "weights"), RunKeys.create(root / "keys").signer()
    tensors = load_file(root / "model" / "model.safetensors")
    for version in (1, 2):
        tensors = {name: tensor * 1.001 for name, tensor in tensors.items()}
        manifest = Manifest(
            run_id="bench", version=version, kind="anchor", dtype="float32",
            chunks=store.put_chunks(save(tensors)), tensors=dict.fromkeys(tensors, ""),
            canary=Canary(token_ids=CANARY_IDS, logprobs=[-10.0] * (len(CANARY_IDS) - 1)),
        )  # fmt: skip
        store.put_manifest(version, sign(manifest, signer))


def resident(field: str) -> int:
    """Return VmRSS or VmHWM, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class WholeReceiver:
    """The former way."""

    def __init__(self, engine: LocalEngine, store: WeightStore) -> None:
        self._engine, self._store, self._good = engine, store, None

    async def install(self, manifest: Manifest) -> None:
        from safetensors.torch import load

        pieces = []
        for ref in manifest.chunks:
            data = bytearray()
            while len(data) < ref.size:
                data += self._store.chunk(ref.sha256, len(data), 4 << 20) or b""
            pieces.append(bytes(data))
            assert hashlib.sha256(data).hexdigest() == ref.sha256
        tensors = load(b"".join(pieces))
        for tensor in tensors.values():
            hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()
        await self._engine.load_weights(manifest.version, tensors)
        await self._engine.score(CANARY_IDS)
        self._good = tensors


async def measure(root: Path, side: str) -> dict[str, float]:
    store, keys = WeightStore(root / "weights"), RunKeys(root / "keys")
    config = InferenceConfig(device="cpu", dtype="float32", local=LocalEngineConfig(max_batch=1, kv_cache_gib=0.1))
    engine = LocalEngine(root / "model", config, 256)
    await engine.start()
    await engine.score(CANARY_IDS)
    serving = resident("VmRSS")
    receiver = Receiver(engine, FolderSource(store), root / "model", canary_tolerance=50)
    whole = WholeReceiver(engine, store)
    for version in (1, 2):
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        if side == "whole":
            await whole.install(open_signed(store.manifest(version), keys.verifier(), run_id="bench"))
        else:
            await receiver.install(store.manifest(version), keys.verifier().public_bytes_raw(), "bench")
    peak = resident("VmHWM")
    receiver.close()
    await engine.close()
    size = sum(path.stat().st_size for path in (root / "model").glob("*.safetensors"))
    return {"snapshot": size, "before": 1 + (before - serving) / size, "peak": 1 + (peak - serving) / size}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=("whole", "streamed"))
    parser.add_argument("--root", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.side:
        print(json.dumps(asyncio.run(measure(options.root, options.side))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        print("peak of a node at its second install, in snapshots (the engine's own weights are 1)")
        for side in ("whole", "streamed"):
            command = [sys.executable, __file__, "--side", side, "--root", folder]
            figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                f"  {side:9} {figures['peak']:.2f}   (before that install {figures['before']:.2f}; "
                f"snapshot {figures['snapshot'] / 1e6:.0f} MB)"
            )
    is_good = figures["peak"] <= TARGET
    print(f"{'met   ' if is_good else 'MISSED'} streamed: {figures['peak']:.2f} snapshots, at most {TARGET}")
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
