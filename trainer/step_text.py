"""One optimizer step in words: what every run has, what channels 2 and 3 did, how a joint run goes."""

from __future__ import annotations

from composer_prime.monitor.progress import Round, Step
from composer_prime.wording import counted


def step_line(step: Step, max_steps: int) -> str:
    """One step in one line; figures that the trainer did not report are left out."""
    parts = [f"step {step.step}/{max_steps}"]
    if step.reward is not None:
        spread = f" ±{step.reward_std:.2f}" if step.reward_std is not None else ""
        parts.append(f"reward {step.reward:.3f}{spread}")
    if step.loss is not None:
        parts.append(f"loss {step.loss:+.4f}")
    if step.tokens_per_s is not None:
        parts.append(f"{step.tokens_per_s:,.0f} tok/s")
    if step.step_s is not None:
        waited = f" (waited {step.wait_s:.1f} s)" if step.wait_s is not None else ""
        parts.append(f"{step.step_s:.1f} s{waited}")
    if step.staleness is not None:
        parts.append(f"staleness {step.staleness:g}")
    if step.mismatch_kl is not None:
        parts.append(f"kl {step.mismatch_kl:.1e}")
    return "  ".join(parts)


def channels_text(step: Step) -> str:
    """What channels 2 and 3 trained on in this step; empty where both are off."""
    parts = []
    if step.hinted_turns is not None:
        divergence = f", jsd {step.jsd:.4f}" if step.hinted_turns and step.jsd is not None else ""
        parts.append(f"hints: {counted(int(step.hinted_turns), 'turn')}{divergence}")
    if step.pairs is not None:
        accuracy = f", accuracy {step.accuracy:.2f}" if step.pairs and step.accuracy is not None else ""
        parts.append(f"teachers: {counted(int(step.pairs), 'pair')}{accuracy}")
    return "  ".join(parts)


def round_text(last: Round) -> str:
    """The last outer step of a joint run."""
    return (
        f"round {last.number}, {counted(last.peers, 'peer')}, {last.sent_bytes / 1e6:,.1f} MB sent, "
        f"waited {last.waited_s:.1f} s for it"
    )
