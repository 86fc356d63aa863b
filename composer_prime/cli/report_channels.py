"""The lines of `composer report` about channels 2 and 3: which turns were hinted, what pairs were trained on."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from composer_prime.monitor.progress import ends, number
from composer_prime.monitor.tail import Line
from composer_prime.wording import counted

_INDENT = " " * 15


def hint_lines(trained: list[Line]) -> list[str]:
    """`trained`: the trainer's lines by step. Empty where channel 2 was off."""
    if not any("loss/sdpo" in line for line in trained):
        return []
    found, hinted = _sum(trained, "hints/found"), _sum(trained, "hints/hinted")
    share = f" ({hinted / found:.0%})" if found else ""
    turns, steps = _sum(trained, "sdpo/turns"), sum((number(line, "sdpo/turns") or 0) > 0 for line in trained)
    text = [
        f"  hints        {hinted:,.0f} of {counted(int(found), 'wrong turn')} got one{share}; "
        f"{turns:,.0f} distilled, in {steps} of {counted(len(trained), 'step')}"
    ]
    text += _counts("kinds", trained, "hints/kind/") + _counts("written by", trained, "hints/layer/")
    text += _counts("left out", trained, "hints/skipped/")
    text += _moved("jsd", trained, "sdpo/jsd", ".4f", "nats a token, of the steps that had such turns")
    return text + _moved("turn errors", trained, "rollout/turn_error_rate", ".3f", "of assistant turns")


def pair_lines(trained: list[Line], lines: list[Line]) -> list[str]:
    """`lines`: of all roles, for the replay while training. Empty where channel 3 was off."""
    text = []
    if any("loss/replay_dpo" in line for line in trained):
        last = next((line for line in reversed(trained) if "pairs/in_file" in line), {})
        held, refused = number(last, "pairs/in_file") or 0, number(last, "pairs/refused") or 0
        passes = f", round {last['pairs/pass'] + 1:.0f} through the file" if "pairs/pass" in last else ""
        text.append(
            f"  pairs        {_sum(trained, 'dpo/pairs'):,.0f} trained; {held:,.0f} in the file, "
            f"{refused:,.0f} of them refused{passes}"
        )
        text += _counts("refused", [last], "pairs/refused/")
        text += _moved("accuracy", trained, "dpo/accuracy", ".3f", "of the pairs preferred as by the teachers")
        text += _moved("displacement", trained, "dpo/displacement", "+.3f", "of the chosen answers, nats a token")
    return text + _replay(lines)


def _replay(lines: list[Line]) -> list[str]:
    """What a replay beside the training came to."""
    newest = next((line for line in reversed(lines) if "replay/states" in line or "replay/failed" in line), {})
    failed = bool(newest.get("replay/failed"))
    last = next((line for line in reversed(lines) if "replay/states" in line), None)
    if last is None:
        return ["  replay       failed: logs/orchestrator.log says why"] if failed else []
    figures = {name: number(last, name) or 0.0 for name in last if name.startswith(("replay/", "gate/"))}
    early = failed or figures.get("replay/stopped")
    stopped = f"; {'failed' if failed else 'stopped early'}, logs/orchestrator.log says why" if early else ""
    text = [
        f"  replay       {figures['replay/pairs']:,.0f} pairs of {figures['replay/states']:,.0f} states; "
        f"{figures['replay/calls']:,.0f} calls, {figures['replay/cached']:,.0f} answers from the cache{stopped}"
    ]
    if "gate/measured" in figures:
        text.append(
            f"{_INDENT}gate: {figures['gate/windows_passed']:.0f} windows passed, "
            f"{figures['gate/windows_missed']:.0f} missed; {figures['gate/pairs_passed']:,.0f} of "
            f"{figures['gate/measured']:,.0f} measured pairs may be trained"
        )
    return text


def _sum(trained: list[Line], name: str) -> float:
    return sum(number(line, name) or 0.0 for line in trained)


def _counts(label: str, lines: list[Line], prefix: str) -> list[str]:
    """Totals of all figures below `prefix`, the largest first."""
    totals: Counter[str] = Counter()
    for line in lines:
        totals.update({name.removeprefix(prefix): line[name] for name in line if name.startswith(prefix)})
    told = ", ".join(f"{name} {count:,.0f}" for name, count in totals.most_common() if count)
    return [f"{_INDENT}{label}: {told}"] if told else []


def _moved(label: str, trained: list[Line], name: str, shape: str, unit: str) -> list[str]:
    """Means of the first and of the last steps that have the figure."""
    values = [value for line in trained if (value := number(line, name)) is not None]
    first, last = ends(values)
    if not last:
        return []
    before = f"first {len(first)} {format(fmean(first), shape)}, " if first else ""
    return [f"{_INDENT}{label}: {before}last {len(last)} {format(fmean(last), shape)} ({unit})"]
