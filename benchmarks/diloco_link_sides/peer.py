"""One peer of diloco_link.py, as a process: the product's outer loop around steps that take a fixed time.

An inner step is a sleep, as on a cluster whose accelerator computes while its CPU is free, and an SGD step along fixed
gradients. The peer reads commands from its standard input, one a line:

    {"step_s": 2.0, "diloco": {...}}     joins a run with these values of [diloco] (a joint run of its own each time)
    {"steps": 6}                         takes that many inner steps

It answers each with one line: the seconds of a step without the outer loop, or the seconds of each step.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from composer_prime.config.diloco import DilocoConfig
from diloco.streaming import StreamingDiLoCo


def stack(blocks: int, width: int) -> nn.Module:
    """`blocks` square matrices of `width`, the same on every peer."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))
    return model


def main() -> None:
    """argv: blocks, width, seed of the gradients."""
    blocks, width, seed = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    orders = map(json.loads, sys.stdin)
    order = next(orders, None)
    while order is not None:
        order = take_part(stack(blocks, width), seed, order, orders)


def take_part(model: nn.Module, seed: int, order: dict[str, Any], orders: Iterator[dict[str, Any]]) -> dict | None:
    """One joint run, until the next is ordered."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    plain_s, config = plain_step_s(optimizer), DilocoConfig.model_validate(order["diloco"])
    with StreamingDiLoCo(model.named_parameters(), optimizer, config) as engine:
        print(json.dumps({"plain_s": plain_s}), flush=True)
        for following in orders:
            if "steps" not in following:
                return following
            print(json.dumps([inner_step(engine, optimizer, order["step_s"]) for _ in range(following["steps"])]))
            sys.stdout.flush()
    return None


def plain_step_s(optimizer: torch.optim.Optimizer) -> float:
    """Seconds of an optimizer step without the outer loop, taken with a rate of 0: all peers must start the same."""
    group, seconds = optimizer.param_groups[0], []
    rate, group["lr"] = group["lr"], 0.0
    for _ in range(5):
        began = time.monotonic()
        optimizer.step()
        seconds.append(time.monotonic() - began)
    group["lr"] = rate
    return statistics.median(seconds)


def inner_step(engine: StreamingDiLoCo, optimizer: torch.optim.Optimizer, step_s: float) -> dict[str, Any]:
    """A step's seconds, and, if a synchronization ended in it, its wait, its peers and its outcome."""
    time.sleep(step_s)
    engine.count(tokens=1)
    before, began = engine.outer_step, time.monotonic()
    optimizer.step()
    line: dict[str, Any] = {"call_s": time.monotonic() - began}
    if engine.outer_step > before:
        line |= {
            "waited_s": engine.metrics["diloco/sync_s"],
            "participants": engine.metrics["diloco/participants"],
            "outcome": [engine.outer_step, engine.global_model.hash],
        }
    return line


if __name__ == "__main__":
    main()
