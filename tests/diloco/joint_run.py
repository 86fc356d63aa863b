"""Small joint runs: a rendezvous in a thread, peers in threads or processes, and a plain oracle of the algorithm."""

import asyncio
import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from waiting import wait_until

from composer_prime.config.diloco import DilocoConfig
from diloco.rendezvous.rendezvous import Rendezvous
from diloco.rendezvous.rounds import RendezvousSettings
from diloco.streaming import StreamingDiLoCo
from diloco.transport.messages import JointKey

RUN = "joint"
until = wait_until


class Blocks(nn.Module):
    """An embedding tied to the head, and `blocks` residual blocks."""

    def __init__(self, seed: int = 0, blocks: int = 4, width: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():  # not from the global generator, which peers in threads would share
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def loss_of(model: nn.Module, peer: int, step: int) -> Tensor:
    """The loss of `peer`'s step `step` (from 0), on data that belong to the two numbers alone."""
    generator = torch.Generator().manual_seed(1000 * peer + step)
    ids = torch.randint(0, 16, (8, 5), generator=generator)
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, peer: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, peer, step).backward()
    optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class RendezvousThread:
    """A rendezvous that can be stopped and started again at the same address."""

    def __init__(self, key: JointKey, **settings: Any) -> None:
        self.key = key
        self.settings = {"run": RUN, "bind": "tcp://127.0.0.1:0", "beat_timeout_s": 1.0, **settings}
        self.start()

    def start(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(200)
        self.settings["bind"] = self.endpoint

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with Rendezvous(RendezvousSettings(**self.settings), self.key) as self.server:
            self.endpoint = self.server.endpoint
            self._ready.set()
            serving = asyncio.create_task(self.server.serve())
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if serving.done():
                serving.result()
            serving.cancel()
            await asyncio.wait({serving, stopping})

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()


@dataclass
class Trajectory:
    """What a peer saw."""

    hashes: dict[int, str] = field(default_factory=dict)
    """Of the global model after each outer step that this peer took part in."""
    versions: dict[int, str] = field(default_factory=dict)
    """Of what would be published after each full sweep."""
    masters: list[Tensor] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    local: dict[str, Tensor] = field(default_factory=dict)
    residuals: list[Tensor] = field(default_factory=list)


def settings(rendezvous: str, key_file: Path, peer: str, **overrides: Any) -> DilocoConfig:
    values = {"rendezvous": rendezvous, "run": RUN, "peer_id": peer, "key_file": key_file, "codec": {"type": "fp32"}}
    waits = {"round_deadline_s": 10, "round_timeout_s": 15, "offline_timeout_s": 20}
    return DilocoConfig.model_validate({**values, **waits, **overrides})


def train(
    config: DilocoConfig,
    peer: int,
    steps: int,
    *,
    before_step: Callable[[int, StreamingDiLoCo], None] = lambda step, engine: None,
    seed: int = 0,
    tokens: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> Trajectory:
    """Take `steps` inner steps as `peer`, or fewer if told to stop; what it saw."""
    model = Blocks(seed)
    optimizer = adamw(model)
    seen = Trajectory()
    with StreamingDiLoCo(model.named_parameters(), optimizer, config) as engine:
        see(seen, engine)
        for step in range(steps):
            if stop():
                break
            before_step(step, engine)
            engine.count(tokens=tokens)
            inner_step(model, optimizer, peer, step)
            record(seen, engine)
        engine.finish()
        record(seen, engine)
    keep(seen, engine)
    seen.local = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return seen


def see(seen: Trajectory, engine: StreamingDiLoCo) -> None:
    swept = b"".join(values.numpy().tobytes() for values in engine.global_model.swept)
    seen.hashes[engine.outer_step] = engine.global_model.hash
    seen.versions[engine.sweep] = hashlib.blake2b(swept).hexdigest()


def keep(seen: Trajectory, engine: StreamingDiLoCo) -> None:
    """How the global model and the error feedback ended."""
    seen.masters = [master.clone() for master in engine.global_model.masters]
    seen.velocity = [velocity.clone() for velocity in engine.global_model.velocity]
    seen.residuals = [residual.clone() for residual in engine.replica.feedback.residuals]


def record(seen: Trajectory, engine: StreamingDiLoCo) -> None:
    see(seen, engine)
    seen.metrics[engine.outer_step] = dict(engine.metrics)


def together(*calls: Callable[[], Any], timeout_s: float = 200) -> list[Any]:
    """Run each in a thread of its own; their results in order."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(timeout_s) for future in [threads.submit(call) for call in calls]]


def assert_same_globals(*trajectories: Trajectory) -> None:
    """Equal hashes at every outer step and equal versions that two peers both saw, equal final values and momentum."""
    for other in trajectories[1:]:
        both = trajectories[0].hashes.keys() & other.hashes.keys()
        assert both and all(trajectories[0].hashes[step] == other.hashes[step] for step in both)
        versions = trajectories[0].versions.keys() & other.versions.keys()
        assert all(trajectories[0].versions[sweep] == other.versions[sweep] for sweep in versions)
        ours, theirs = ([*each.masters, *each.velocity] for each in (trajectories[0], other))
        assert all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs)
