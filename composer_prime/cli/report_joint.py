"""The lines of `composer report` about a joint run, as one peer's trainer logged it: rounds, peers, bytes, waiting."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from composer_prime.errors import ComposerError
from composer_prime.monitor.progress import Progress, number
from composer_prime.monitor.tail import Line
from composer_prime.run_dir import RunDir
from composer_prime.wording import counted

_INDENT = " " * 15


@dataclass(slots=True)
class Rounds:
    """What the lines of a run add up to. Lines between two rounds repeat the last one, so only new ones count."""

    outer_step: int = 0
    sweep: int = 0
    ended: int = 0
    """Rounds whose outcome this peer logged; of several that it caught up with in one step, the last."""
    by_peer: Counter[str] = field(default_factory=Counter)
    """Rounds that hold a peer's delta."""
    sizes: list[int] = field(default_factory=list)
    """Peers of each round."""
    rejected: int = 0
    waited_s: float = 0.0
    steps_s: float = 0.0
    sent: float = 0.0
    """Bytes of rank 0, over all starts of the run."""
    received: float = 0.0

    @classmethod
    def of(cls, lines: list[Line]) -> Rounds:
        """`lines`: of all roles, in file order."""
        found, sent, received = cls(), 0.0, 0.0
        for line in lines:
            if line.get("event") == "resume":
                sent = received = 0.0
            if line.get("role") != "trainer":
                continue
            found.steps_s += number(line, "time/step_s") or 0.0
            outer_step = number(line, "diloco/outer_step")
            if outer_step is None:
                continue
            now = number(line, "diloco/bytes_sent") or 0.0, number(line, "diloco/bytes_received") or 0.0
            found.sent, found.received = found.sent + max(now[0] - sent, 0), found.received + max(now[1] - received, 0)
            sent, received = now
            if int(outer_step) != found.outer_step:
                found._take(line, int(outer_step))
        return found

    def _take(self, line: Line, outer_step: int) -> None:
        peers = [name.split("/")[1] for name in line if name.startswith("diloco/") and name.endswith("/inner_steps")]
        self.outer_step, self.sweep = outer_step, int(number(line, "diloco/sweep") or 0)
        self.ended += 1
        self.by_peer.update(peers)
        self.sizes.append(len(peers))
        self.rejected += int(number(line, "diloco/rejected") or 0)
        self.waited_s += number(line, "diloco/sync_s") or 0.0


def joint_lines(run_dir: RunDir, lines: list[Line]) -> list[str]:
    """Empty for a run that trained alone, or that has no round behind it."""
    rounds = Rounds.of(lines)
    if not rounds.ended:
        return []
    last = next(line for line in reversed(lines) if "diloco/outer_step" in line)
    shares = ", ".join(f"{peer} {count}" for peer, count in sorted(rounds.by_peer.items()))
    alone = sum(size == 1 for size in rounds.sizes)
    waited = f", {rounds.waited_s / rounds.steps_s:.1%} of the steps' time" if rounds.steps_s else ""
    return [
        f"  joint run    outer step {rounds.outer_step}, {counted(rounds.sweep, 'full sweep')}; "
        f"{counted(rounds.ended, 'round')} taken, {last.get('diloco/missed_rounds', 0):.0f} missed, "
        f"{counted(rounds.rejected, 'delta')} rejected",
        f"{_INDENT}peers: rounds with the work of {shares}; {alone} with one peer alone",
        f"{_INDENT}hashes: equal on all peers of each of these rounds, else they are not averaged",
        f"{_INDENT}link: {rounds.sent / 1e6:,.1f} MB sent, {rounds.received / 1e6:,.1f} MB received a rank"
        f"{_bits(run_dir, rounds)}",
        f"{_INDENT}waiting: {rounds.waited_s:,.1f} s for rounds to end{waited}",
        f"{_INDENT}tokens: work of {last.get('diloco/carried_tokens', 0):,.0f} was late and carried on, of "
        f"{last.get('diloco/overwritten_tokens', 0):,.0f} given up (that of the delay's steps too)",
        *_final(lines),
    ]


def _final(lines: list[Line]) -> list[str]:
    """The global model that the run ended with; nothing where it has not ended."""
    progress = Progress()
    progress.update(lines)
    return [f"{_INDENT}joint model: {progress.ended.text}"] if progress.ended is not None else []


def _bits(run_dir: RunDir, rounds: Rounds) -> str:
    """All that was sent over the parameters of the fragments sent; "" where the model cannot be read (yet)."""
    from composer_prime.config.load import read  # a second of CPU time, for joint runs only
    from composer_prime.footprint import ModelShape, trained_parameters

    try:
        config = read(run_dir.config)
        shape = ModelShape.read(run_dir.final)
    except (ComposerError, OSError):
        return ""
    if config.diloco is None:
        return ""
    own = rounds.by_peer[config.diloco.peer_id] or 1
    parameters = trained_parameters(config, shape) / config.diloco.fragments / config.trainer.ranks * own
    return f"; {8 * rounds.sent / parameters:.2f} bits a parameter and sync ({config.diloco.codec.type})"
