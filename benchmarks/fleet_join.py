"""How a machine with nothing but an invite becomes a node: time to the first token, kills in the pull, a late return.

    python benchmarks/fleet_join.py                    all three parts
    uv run --group dev python benchmarks/fleet_join.py --part 1 --bare    needs bubblewrap, 12 GB and a package index

1. Join: an empty state folder and the string -> first accepted token, over loopback, tiny model, `inference join` as a
   user types it. Phases are seen from the gateway. With --bare the machine has a system, uv and the string, and nothing
   else: `uvx --from WHEEL inference join` in a container of bubblewrap with an empty home, which installs everything.
2. Kills: a pull of --mb megabytes is killed (SIGKILL) at 20 seeded points and started again. What the gateway sent
   beyond what was on the node's disk after each kill is fetched twice.
3. Return: a node that stopped 50 versions ago against one with an empty folder. Every version moves --changed of the
   words by one unit in the last place: real steps are measured by weight_sync.py.

Everything is on one machine: no network delays. Times depend on its load, which is printed. The exit status is 1 when a
kill cost more than one chunk, or when the late return pulled more than a tenth of what an empty folder did.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import torch
import zmq
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from zmq.utils import z85

from composer_prime.config import Config
from composer_prime.console import console_script
from composer_prime.model_source import resolve_model
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import CHUNK_BYTES, Canary, Manifest, WeightStore, sign
from composer_prime.wire.enrollment import INVITE_VARIABLE, PROTOCOL, Invite, NodeMachine, release
from inference.enrolling import NodeState, enroll
from inference.pulling import connected, pull_model
from orchestrator.gateway import Gateway
from trainer.weights.version_file import VersionWriter

RUN_ID = "fleet-join"
CANARY = [5, 9, 17, 33, 65, 129, 257, 300]
MACHINE = NodeMachine(gpus=[], driver="", memory=1 << 34, disk=1 << 34, cores=2)
VERSIONS = 50
KILLS = 20
RETURN_TARGET = 0.1


class Run:
    """A gateway with a weight store, as a run has them, without trainer and environments."""

    def __init__(self, root: Path, anchor_every: int = 1 << 20) -> None:
        self.keys = RunKeys.create(root / "keys")
        self.store = WeightStore(root / "weights")
        self.writer = VersionWriter(self.store, anchor_every)
        config = Config.model_validate(
            {
                "run": {"name": RUN_ID},
                "model": {"path": "tiny", "max_context": 512},
                "inference": {"heartbeat_s": 0.5, "lost_after_s": 10.0},
                "orchestrator": {
                    "source": [{"name": "s", "taskset": {"id": "orchestrator.environments.toolsmith"}}],
                    "sampling": {"max_tokens": 16},
                    "no_node_timeout_s": 900.0,
                },
            }
        )
        self.gateway = Gateway(config, self.keys, RUN_ID, self.store, model_dir=resolve_model("tiny"))

    def publish(self, version: int, tensors: dict[str, torch.Tensor], logprobs: list[float]) -> Manifest:
        manifest = Manifest(
            run_id=RUN_ID,
            version=version,
            parent=None,
            kind="anchor",
            dtype=str(next(iter(tensors.values())).dtype).removeprefix("torch."),
            chunks=[],
            tensors=dict.fromkeys(tensors, ""),
            canary=Canary(token_ids=CANARY, logprobs=logprobs),
        )
        manifest = self.writer.write(manifest, tensors)
        self.gateway.publish(sign(manifest, self.keys.signer()))
        return manifest

    def invite(self) -> Invite:
        public, secret = zmq.curve_keypair()
        expires = int(time.time() + 3600)
        self.keys.registry.invite(public, uses=1, expires=expires)
        return Invite(
            addresses=[self.gateway.node_endpoint.removeprefix("tcp://")],
            server=z85.decode(self.keys.curve("server").public),
            secret=z85.decode(secret),
            verify_key=self.keys.verifier().public_bytes_raw(),
            run_id=RUN_ID,
            release=release(),
            protocol=PROTOCOL,
            expires=expires,
        )

    @property
    def bytes_sent(self) -> int:
        return self.gateway.state()["link"]["chunk_bytes_sent"]


async def until(condition, what: str, timeout_s: float = 600.0) -> float:
    """Return when `condition` came true, monotonic seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {timeout_s:g} s for {what}")
        await asyncio.sleep(0.005)
    return time.monotonic()


# ---- 1. join ---------------------------------------------------------------------------------------------------------


def bare_machine(home: Path) -> list[str]:
    """Return what starts `inference join` where there is nothing but a system, uv and an empty home."""
    uv = os.environ.get("UV")  # Set by `uv run`: its own path.
    if uv is None:
        raise SystemExit("--bare: start it with `uv run --group dev python benchmarks/fleet_join.py --part 1 --bare`")
    home.mkdir(parents=True)
    build = [uv, "build", "--quiet", "--wheel", "--out-dir", str(home), str(Path(__file__).parents[1])]
    subprocess.run(build, check=True)
    (wheel,) = home.glob("*.whl")
    system = [path for path in ("/usr", "/bin", "/lib", "/lib64", "/etc", "/opt") if Path(path).exists()]
    return [
        "bwrap", "--unshare-pid", "--die-with-parent", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
        *itertools.chain.from_iterable(("--ro-bind", path, path) for path in system),
        "--ro-bind", uv, "/tmp/uv", "--bind", str(home), str(home), "--setenv", "HOME", str(home),
        "--setenv", "PATH", "/usr/bin:/bin", "--unsetenv", "VIRTUAL_ENV", "--chdir", str(home),
        "/tmp/uv", "tool", "run", "--from", str(wheel), "inference", "join",
    ]  # fmt: skip


async def measure_join(root: Path, *, bare: bool) -> None:
    run = Run(root)
    folder = resolve_model("tiny")
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    weights = {name: value + 0.001 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        logprobs = model(torch.tensor([CANARY])).logits[0, :-1].log_softmax(-1)
    scores = logprobs.gather(-1, torch.tensor(CANARY[1:])[:, None])[:, 0].tolist()
    await run.gateway.start()
    try:
        size = sum(ref.size for ref in run.publish(1, weights, scores).chunks)
        body = {"model": "policy", "token_ids": [5], "sampling_params": {"max_tokens": 1}}

        async def first_token() -> float:
            url = run.gateway.http_url + "/inference/v1/generate"
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
                if reply.status != 200:
                    raise SystemExit(f"the gateway answered {reply.status}: {await reply.text()}")
                await reply.read()
            return time.monotonic()

        token = asyncio.create_task(first_token())
        command = [*console_script("inference"), "join", "--state-dir", str(root / "state")]
        words = bare_machine(root / "home") if bare else command
        environment = os.environ | {INVITE_VARIABLE: run.invite().text()}
        start = time.monotonic()
        with (root / "join.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*words, env=environment, stderr=log)
        ended = asyncio.create_task(process.wait())
        ended.add_done_callback(lambda _: print((root / "join.log").read_text()[-3000:], file=sys.stderr))
        enrolled = await until(run.keys.registry.list, "the enrollment")
        pulling = await until(lambda: run.bytes_sent > 0, "the first chunk")
        pulled = await until(lambda: run.bytes_sent >= size, "the last chunk")
        attached = await until(run.gateway.versions, "the node to attach")
        done = await token
        process.terminate()
        await ended
    finally:
        await run.gateway.close()
    phases = {
        "command to enrollment" + (", with the installation" if bare else ""): enrolled - start,
        "a process with torch, until it asks for chunks": pulling - enrolled,
        f"pull of {size / 1e6:.1f} MB": pulled - pulling,
        "engine start, proof of the weights, attached": attached - pulled,
        "first token": done - attached,
    }
    what = "string and a bare machine" if bare else "string and empty folder"
    print(f"1. {what} to the first accepted token: {done - start:.1f} s")
    for name, seconds in phases.items():
        print(f"   {seconds:6.2f} s  {name}")


# ---- 2. and 3. pulls -------------------------------------------------------------------------------------------------


def pull(invite: Invite, root: Path) -> None:
    """Enroll and pull, as a node does before it starts its engine. Runs in a process of its own."""

    async def work() -> None:
        state = NodeState(root, invite)
        enrolled = await enroll(invite, state, 0, "box", MACHINE, 60.0)
        async with connected(enrolled, 30.0) as link:
            await pull_model(link, invite, enrolled, state, 0)

    asyncio.run(work())


def start_pull(invite: Invite, root: Path):
    process = multiprocessing.get_context("forkserver").Process(target=pull, args=(invite, root))
    process.start()
    return process


def made_up(megabytes: int) -> dict[str, torch.Tensor]:
    """Return bfloat16 tensors of a model that nobody trained: only their bytes matter."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, megabytes // 16)
    return {
        f"layers.{index}.weight": torch.randn(8 << 20, generator=generator).to(torch.bfloat16) for index in range(count)
    }


def step(tensors: dict[str, torch.Tensor], share: float, version: int) -> None:
    """Move `share` of the words by one unit in the last place."""
    generator = torch.Generator().manual_seed(version)
    for values in tensors.values():
        words = values.view(torch.int16)
        chosen = torch.randint(len(words), (int(share * len(words)),), generator=generator)
        words[chosen] += 1


def held(invite: Invite, root: Path) -> int:
    """Return the bytes of chunks and model files on the node's disk."""
    state = NodeState(root, invite)
    paths = [*state.chunks(0).glob("*"), *state.model.glob("*")]
    return sum(path.stat().st_size for path in paths if not path.name.startswith((".", "model.safetensors")))


async def measure_kills(root: Path, megabytes: int, seed: int) -> float:
    """Return the bytes that came twice because of the worst kill, in chunks."""
    run = Run(root)
    await run.gateway.start()
    try:
        manifest = run.publish(1, made_up(megabytes), [-1.0] * (len(CANARY) - 1))
        size = sum(ref.size for ref in manifest.chunks)
        invite, folder = run.invite(), root / "state"
        draw = random.Random(seed)
        points = sorted(draw.uniform(0.02, 0.98) * size for _ in range(KILLS))
        wasted: list[int] = []
        for point in points:
            process = start_pull(invite, folder)
            await until(lambda point=point: held(invite, folder) >= point, "the pull to reach its point")
            process.kill()
            process.join()
            before = -1
            while run.bytes_sent != before:  # what the gateway still hands to the closed connection
                before = run.bytes_sent
                await asyncio.sleep(0.3)
            wasted.append(run.bytes_sent - held(invite, folder) - sum(wasted))
        process = start_pull(invite, folder)
        await until(lambda: not process.is_alive(), "the last pull")
        if process.exitcode != 0:
            raise SystemExit(f"the last pull ended with status {process.exitcode}")
        sent = run.bytes_sent
    finally:
        await run.gateway.close()
    worst = max(wasted) / CHUNK_BYTES
    print(
        f"2. {KILLS} kills (seed {seed}) in a pull of {size / 1e6:.0f} MB in {len(manifest.chunks)} chunks: "
        f"{sent / size:.2f} x its bytes were sent\n"
        f"   fetched twice after a kill, in chunks of 16 MiB: at most {worst:.2f}, on average "
        f"{sum(wasted) / KILLS / CHUNK_BYTES:.2f}"
    )
    return worst


async def measure_return(root: Path, megabytes: int, share: float) -> float:
    """Return the bytes that the late node pulled, over those of one with an empty folder."""
    run = Run(root)
    tensors, logprobs = made_up(megabytes), [-1.0] * (len(CANARY) - 1)
    await run.gateway.start()

    async def pulled(invite: Invite, folder: Path) -> int:
        before, process = run.bytes_sent, start_pull(invite, folder)
        await until(lambda: not process.is_alive(), "a pull")
        if process.exitcode != 0:
            raise SystemExit(f"a pull ended with status {process.exitcode}")
        return run.bytes_sent - before

    try:
        run.publish(1, tensors, logprobs)
        invite = run.invite()
        await pulled(invite, root / "old")
        for version in range(2, VERSIONS + 2):
            step(tensors, share, version)
            manifest = run.publish(version, tensors, logprobs)
        late = await pulled(invite, root / "old")
        full = await pulled(run.invite(), root / "new")
    finally:
        await run.gateway.close()
    whole = sum(value.nbytes for value in tensors.values())
    print(
        f"3. {VERSIONS} versions behind ({share:.2%} of the words of {whole / 1e6:.0f} MB moved in each; the newest is "
        f"{manifest.kind}): {late / 1e6:.2f} MB, with an empty folder {full / 1e6:.2f} MB: {full / max(late, 1):.1f} x"
    )
    return late / full


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=[1, 2, 3], help="only this part")
    parser.add_argument("--bare", action="store_true", help="part 1 on a machine without this release; see above")
    parser.add_argument("--mb", type=int, default=192, help="size of the pull that is killed")
    parser.add_argument("--return-mb", type=int, default=64, help="size of the model of part 3")
    parser.add_argument("--changed", type=float, default=0.001, help="share of the words that a version moves")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["inference.pulling", "inference.enrolling"])
    answers: list[tuple[str, bool]] = []
    with tempfile.TemporaryDirectory(prefix="fleet-join-") as name:
        root = Path(name)
        if options.part in (None, 1):
            asyncio.run(measure_join(root / "join", bare=options.bare))
        if options.part in (None, 2):
            worst = asyncio.run(measure_kills(root / "kills", options.mb, options.seed))
            answers.append((f"the worst kill cost {worst:.2f} chunks, at most 1", worst <= 1))
        if options.part in (None, 3):
            share = asyncio.run(measure_return(root / "return", options.return_mb, options.changed))
            text = f"the late return pulled {share:.1%} of a whole pull, at most {RETURN_TARGET:.0%}"
            answers.append((text, share <= RETURN_TARGET))
    for text, is_good in answers:
        print(f"{'met   ' if is_good else 'MISSED'} {text}")
    return int(not all(is_good for _, is_good in answers))


if __name__ == "__main__":
    raise SystemExit(main())
