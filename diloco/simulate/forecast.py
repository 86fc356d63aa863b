"""What a link gives the joint run of a configuration: the rows about the link in its plan."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from composer_prime.config import Config
from composer_prime.config.diloco import DilocoConfig, OuterConfig
from composer_prime.console import pluralize
from composer_prime.errors import ComposerError
from composer_prime.model_source import model_ready, resolve_model
from composer_prime.plan.footprint import ModelShape, trained_parameters
from composer_prime.run.run_dir import RunDir
from diloco.simulate.joint_run import JointRun, codec_bits, deadline_warning, forecast_link, heal_warning

LINKS_MBIT = (1000.0, 100.0)
"""Of each peer and of the rendezvous, where the configuration names none."""
ASSUMED_STEP_S = 60.0
DEFAULT_MEMORY_GB = 16.0
"""Of `diloco rendezvous`."""
_STEPS = 10
"""The last steps of a run: their median time is a step's."""


def link_rows(config: Config) -> list[tuple[str, str]]:
    """Return (label, text) as in a plan; none without [diloco] or without a model folder to count parameters in."""
    diloco = config.diloco
    if diloco is None:
        return []
    try:
        if model_ready(config.model.path) is not None:
            return []
    except ComposerError:  # the plan lists it as a problem
        return []
    shape = ModelShape.read(resolve_model(config.model.path))
    measured_s = step_s(RunDir(config.run_directory).metrics)
    run = JointRun(
        parameters=trained_parameters(config, shape), layers=shape.layers, step_s=measured_s or ASSUMED_STEP_S,
        every=diloco.sync_every, fragments=diloco.fragments, delay=diloco.delay, codec=diloco.codec,
        ranks=config.trainer.ranks, momentum=momentum_share(diloco.outer, shape),
        peers=diloco.task_shard[1] if diloco.task_shard is not None and diloco.task_shard[1] > 1 else 2,
    )  # fmt: skip
    source = f"as in the last {_STEPS} steps of this run" if measured_s else "assumed"
    interval = run.every // run.fragments
    first = (
        f"{run.size / 1e6:,.1f} M parameters (one of {pluralize(run.fragments, 'fragment')}) every "
        f"{pluralize(interval, 'step')}, {diloco.codec.type}: about {codec_bits(run.codec):.2g} bits each; "
        f"{run.peers} peers, {run.step_s:.3g} s a step ({source})"
    )
    limit = diloco.rate_limit_mbit
    links = LINKS_MBIT if limit is None else (limit * config.trainer.ranks,)
    muon_note = (
        "the time of Muon's steps, which no link changes, is not in this forecast: docs/explanation/joint-runs.md "
        "counts their operations"
    )
    muon = [("", muon_note)] if diloco.outer.type == "muon" else []
    return [("link", first), *(("", _link_text(run, mbit, diloco)) for mbit in links), *muon, ("", _memory_text(run))]


def _memory_text(run: JointRun) -> str:
    rounds, with_state = run.rendezvous_bytes
    text = (
        f"memory: {size(run.host_bytes)} of this cluster's hosts for the outer loop; the rendezvous needs "
        f"{size(rounds)}, with a joining cluster's state {size(with_state)} (--memory-gb)"
    )
    if with_state <= 1e9 * DEFAULT_MEMORY_GB:
        return text
    return (
        f"{text}; warning: --memory-gb is {DEFAULT_MEMORY_GB:g} unless given: start `diloco rendezvous` with "
        f"--memory-gb {math.ceil(with_state / 1e9)}"
    )


def momentum_share(outer: OuterConfig, shape: ModelShape) -> float:
    """Return the share of a model's parameters with outer momentum: with Muon not the matrices of its blocks."""
    if not outer.momentum:
        return 0.0
    if outer.type != "muon":
        return 1.0
    return shape.vocabulary * shape.hidden * (1 if shape.tied else 2) / shape.parameters


def _link_text(run: JointRun, mbit: float, diloco: DilocoConfig) -> str:
    forecast = forecast_link(run, run.net(mbit / 1e3))
    interval_s = run.every / run.fragments * run.step_s + forecast.exposed_s
    hidden = f", all but {forecast.exposed_s:.2g} s hidden by delay {run.delay:g}" if run.delay else ""
    warnings = (
        deadline_warning(forecast.send_s, diloco.round_deadline_s, "diloco.round_deadline_s"),
        heal_warning(forecast.heal_s, diloco.heal_timeout_s, "diloco.heal_timeout_s"),
    )
    codec = f" ({forecast.codec_s:.2g} s of it codec work, never hidden)"
    return (
        f"at {mbit:,.0f} Mbit/s: {forecast.sync_s:.2g} s a synchronization{codec}{hidden}, utilization "
        f"{forecast.utilization:.1%}; "
        f"{size(forecast.sent_bytes)} each way, {size(forecast.sent_bytes * 86400 / interval_s)} a day"
        + "".join(f"; warning: {warning}" for warning in warnings if warning)
    )


def step_s(metrics: Path) -> float | None:
    """Return the median seconds of a run's last steps; None before the first."""
    if not metrics.is_file():
        return None
    lines = [json.loads(line) for line in metrics.read_text().splitlines() if '"time/step_s"' in line]
    return statistics.median(line["time/step_s"] for line in lines[-_STEPS:]) if lines else None


def size(count: float) -> str:
    """Format bytes in decimal units, as links have them."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e3:.3g} kB"
