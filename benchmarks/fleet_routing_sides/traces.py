"""What rollouts ask of a fleet: drawn from a seed, recorded by runs, or recorded by mini-swe-agent.

A run's trace is a line of rollouts/step_*.jsonl in its directory. A turn's new prompt is what the messages since the
answer before added, and the template's own tokens, spread evenly over the rollout's turns. The tools' time is what lies
between an answer and the next request. Groups are whole: one with a rollout that failed, branched or has no times is
left out, and counted.

A mini-swe-agent trace is a *.traj.json of its version 2. Lengths are those of the model's own usage reports. The tools'
time is what lies between an answer and its last observation. Eight trajectories, in the order of their names, make a
group.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from composer_prime.errors import ConfigError
from composer_prime.monitor.rollouts import open_run, read_rollouts, rollout_files

SIBLINGS = 8


@dataclass(frozen=True, slots=True)
class Turn:
    new_prompt: int
    answer: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Group:
    rollouts: list[list[Turn]]


def make_groups(count: int, seed: int) -> list[Group]:
    """Return drawn traces; see benchmarks/fleet_routing.py."""
    draw = np.random.default_rng(seed)

    def lengths(median: float, sigma: float, most: int) -> int:
        return int(np.clip(draw.lognormal(np.log(median), sigma), 1, most))

    groups = []
    for _ in range(count):
        prompt = int(np.exp(draw.uniform(np.log(400), np.log(3000))))
        rollouts = []
        for _ in range(SIBLINGS):
            turns = []
            for number in range(1 + int(draw.poisson(5))):
                new = prompt if number == 0 else lengths(200, 0.8, 4000)
                turns.append(Turn(new, lengths(120, 0.9, 2000), float(draw.lognormal(np.log(0.5), 1.0))))
            rollouts.append(turns)
        groups.append(Group(rollouts))
    return groups


def recorded_groups(folders: Sequence[str]) -> tuple[list[Group], int]:
    """Return the groups in run directories and folders of trajectories, and how many were left out.

    Raises ConfigError.
    """
    found: list[Group] = []
    left_out = 0
    for folder in folders:
        if trajectories := sorted(Path(folder).rglob("*.traj.json"), key=lambda path: (path.name, path)):
            read = [trajectory_turns(json.loads(path.read_bytes())) for path in trajectories]
            kept = [turns for turns in read if turns]
            groups = [Group(kept[first : first + SIBLINGS]) for first in range(0, len(kept) - SIBLINGS + 1, SIBLINGS)]
            left_out += -(-len(read) // SIBLINGS) - len(groups)
            found += groups
            continue
        by_group: defaultdict[int, list[list[Turn] | None]] = defaultdict(list)
        for path in rollout_files(open_run(folder), "step").values():
            for line in read_rollouts(path):
                by_group[line["group"]].append(recorded_turns(line))
        whole = [Group([turns for turns in rollouts if turns]) for rollouts in by_group.values()]
        whole = [group for group in whole if len(group.rollouts) == SIBLINGS]
        left_out += len(by_group) - len(whole)
        found += whole
    if not found:
        raise ConfigError(
            f"no group of {SIBLINGS} whole rollouts in {', '.join(folders)} ({left_out} others): record a run of this "
            f"release with orchestrator.group_size {SIBLINGS}, whose turns have the times of their requests, or pass "
            f"{SIBLINGS} trajectories or more"
        )
    return found, left_out


def recorded_turns(rollout: Mapping[str, Any]) -> list[Turn] | None:
    """Return a rollout's turns; None when it failed, branched, or lacks a length or a time."""
    messages = rollout["turns"]
    if rollout["error"] or any(message["parent"] != (index - 1 if index else None)
                               for index, message in enumerate(messages)):  # fmt: skip
        return None
    asked: list[tuple[int, Mapping[str, Any]]] = []
    new = 0
    for message in messages:
        if message["token_count"] is None or (message["call"] is not None and message.get("answered_s") is None):
            return None
        if message["call"] is None:
            new += message["token_count"]
        else:
            asked.append((new, message))
            new = 0
    if not asked:
        return None
    template = rollout["cost"]["prompt_tokens"] - sum(count for count, _ in asked)
    share, rest = divmod(max(0, template), len(asked))
    ends = [message["asked_s"] for _, message in asked[1:]] + [asked[-1][1]["answered_s"]]
    prompts = [count + share + (rest if number == 0 else 0) for number, (count, _) in enumerate(asked)]
    return [
        Turn(prompt, message["token_count"], max(0.0, end - message["answered_s"]))
        for prompt, end, (_, message) in zip(prompts, ends, asked, strict=True)
    ]


def trajectory_turns(trajectory: Mapping[str, Any]) -> list[Turn] | None:
    """Return a trajectory's turns; None without any, or when one lacks its lengths or does not continue the last."""
    turns: list[Turn] = []
    length, answered_s = 0, 0.0
    for message in trajectory["messages"]:
        extra = message.get("extra", {})
        if message.get("role") == "assistant":
            usage, answered_s = extra.get("response", {}).get("usage"), extra.get("timestamp", 0.0)
            if usage is None:
                return None
            turns.append(Turn(usage["prompt_tokens"] - length, usage["completion_tokens"], 0.0))
            length = usage["total_tokens"]
        elif turns and "timestamp" in extra:
            turns[-1] = replace(turns[-1], tool_s=max(0.0, extra["timestamp"] - answered_s))
    return turns if turns and all(turn.new_prompt > 0 for turn in turns) else None


def drawn(groups: Sequence[Group], count: int, seed: int) -> list[Group]:
    """Return `count` of the recorded `groups`, each as often as the others or once more, in an order from `seed`."""
    draw = np.random.default_rng(seed)
    order = [index for _ in range(-(-count // len(groups))) for index in draw.permutation(len(groups))]
    return [groups[index] for index in order[:count]]


def describe(groups: Sequence[Group]) -> str:
    """Return the lengths of traces in words: medians of what turns and rollouts ask for."""
    rollouts = [turns for group in groups for turns in group.rollouts]
    turns = [turn for each in rollouts for turn in each]
    first = np.median([each[0].new_prompt for each in rollouts])
    return (f"medians: {np.median([len(each) for each in rollouts]):.0f} turns, {first:.0f} tokens of a first prompt, "
            f"{np.median([turn.answer for turn in turns]):.0f} of an answer, "
            f"{np.median([turn.tool_s for turn in turns]):.3f} s of tools")  # fmt: skip
