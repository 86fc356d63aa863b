"""What the launcher shows: a line for each step, evaluation and event; in the end a summary.

The state is RunProgress.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from statistics import fmean

from composer_prime.config import Config
from composer_prime.console import COMPOSER, clock, gib, pluralize, printable, silence
from composer_prime.monitor.metrics_file import Line, numeric_field
from composer_prime.monitor.progress import TREND_STEPS, RunProgress, ends, sparkline
from composer_prime.monitor.rollouts import eval_scores
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.intervals import difference_interval, mean_interval

_FIGURES = {
    "reward/mean": "  reward {:.3f}",
    "reward/std": " ±{:.2f}",
    "loss/total": "  loss {:+.4f}",
    "tokens/s": "  {:,.0f} tok/s",
    "time/step_s": "  {:.1f} s",
    "time/wait_s": " (waited {:.1f} s)",
    "policy/staleness_max": "  staleness {:g}",
    "policy/mismatch_kl": "  kl {:.1e}",
}
"""What a step's line shows of the trainer's figures, in this order."""


def step_line(step: Line, max_steps: int) -> str:
    """Describe a step; figures that were not reported are left out."""
    tokens, step_s = numeric_field(step, "tokens/trained"), numeric_field(step, "time/step_s")
    figures = {**step, "tokens/s": tokens / step_s} if tokens is not None and step_s else step
    text = f"step {step['step']}/{max_steps}"
    for name, form in _FIGURES.items():
        if (value := numeric_field(figures, name)) is not None:
            text += form.format(value)
    return text


def channels_text(step: Line) -> str:
    """Describe what SDPO and replay-DPO trained on; empty when both are off."""
    parts = []
    turns, pairs = numeric_field(step, "sdpo/turns"), numeric_field(step, "dpo/pairs")
    if "loss/sdpo" in step and turns is not None:
        jsd, endorsed = numeric_field(step, "sdpo/jsd"), numeric_field(step, "sdpo/endorsed")
        divergence = f", jsd {jsd:.4f}" if turns and jsd is not None else ""
        parts.append(
            f"hints: {pluralize(int(turns), 'turn')}{divergence}"
            + ("" if endorsed is None else f", {endorsed:.0%} endorsed")
        )
    if "loss/replay_dpo" in step and pairs is not None:
        accuracy = numeric_field(step, "dpo/accuracy")
        right = f", accuracy {accuracy:.2f}" if pairs and accuracy is not None else ""
        parts.append(f"teachers: {pluralize(int(pairs), 'pair')}{right}")
    return "  ".join(parts)


def round_text(step: Line) -> str:
    """Describe the last outer step of a joint run, as a step's line tells of it."""
    sent, waited_s = numeric_field(step, "diloco/bytes_sent") or 0.0, numeric_field(step, "diloco/sync_s") or 0.0
    return (
        f"round {step['diloco/outer_step']:.0f}, {pluralize(int(step['diloco/participants']), 'peer')}, "
        f"{sent / 1e6:,.1f} MB sent, waited {waited_s:.1f} s for it"
    )


FIRST_WAIT_S, NEXT_WAIT_S = 5.0, 30.0
"""After how long without a step the view shows which role waits for what; again every NEXT_WAIT_S."""


class View:
    """A line per step, evaluation and event, and who waits when nothing moves."""

    def __init__(self, config: Config) -> None:
        self._max_steps = config.run.max_steps
        self._evals_shown: dict[int, int] = {}
        self._round_shown = 0
        self._show_waits_at = time.time() + FIRST_WAIT_S
        self._waits_shown: dict[str, str] = {}
        """By role: the wait that was shown since the last step."""

    def begin(self, progress: RunProgress) -> None:
        """Take in what earlier starts of the run have shown. Called once, before the first refresh."""
        self._evals_shown = {step: len(figures) for step, figures in progress.evals.items()}
        if (last := progress.last_step) is not None:
            self._round_shown = progress.steps[last].get("diloco/outer_step", 0)

    def event(self, text: str) -> None:
        """Show one line: a restart, a warning."""
        try:
            print(f"[{time.strftime('%H:%M:%S')}] {printable(text)}", flush=True)
        except BrokenPipeError:
            silence()
            print("trainer: the output was closed; the run continues, and its logs are in logs/", file=sys.stderr)

    def refresh(self, progress: RunProgress, fresh: list[Line]) -> None:
        """Show progress; `fresh` holds the steps since the last call."""
        for step in fresh:
            self.event(f"{step_line(step, self._max_steps)}{self._outlook(progress, step['step'])}")
            if text := channels_text(step):
                self.event(f"  {text}")
            if "diloco/participants" in step and step.get("diloco/outer_step") != self._round_shown:
                self._round_shown = step["diloco/outer_step"]
                self.event(f"  joint run: {round_text(step)}")
        for step, figures in progress.evals.items():
            if self._evals_shown.get(step) != len(figures):
                self._evals_shown[step] = len(figures)
                self.event(f"eval after step {step}: {eval_text(figures)}")
        if fresh:
            self._show_waits_at, self._waits_shown = time.time() + NEXT_WAIT_S, {}
        now = time.time()
        due = now >= self._show_waits_at
        for role, waiting in progress.waiting.items():
            another = self._waits_shown.get(role, waiting.subject) != waiting.subject
            if (due or another) and now - waiting.since >= FIRST_WAIT_S:
                self._show_waits_at = now + NEXT_WAIT_S
                self._waits_shown[role] = waiting.subject
                self.event(f"{role} has waited {now - waiting.since:.0f} s for {waiting.what}")

    def _outlook(self, progress: RunProgress, step: int) -> str:
        """Return the time left, and each TREND_STEPS steps the mean reward."""
        left_s, recent = progress.left_s(self._max_steps), progress.recent_reward()
        left = f"  {clock(left_s)} left" if left_s is not None else ""
        is_due = recent is not None and step % TREND_STEPS == 0
        return f"{left}  (mean reward of {TREND_STEPS} steps {recent:.3f})" if is_due else left


def eval_text(figures: dict[str, float]) -> str:
    """Describe one evaluation: figures with an interval, and failures."""
    main_names = [name for name in figures if f"{name}_low" in figures] or [name for name in figures if "mean" in name]
    parts = []
    for name in main_names or sorted(figures):
        low, high = figures.get(f"{name}_low"), figures.get(f"{name}_high")
        spread = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
        parts.append(f"{name} {figures[name]:.3f}{spread}")
    parts += [f"{name} {count:.0f}" for name, count in figures.items() if name.endswith("/failed") and count]
    return ", ".join(parts)


def run_summary(
    config: Config, run_dir: RunDir, start_step: int, progress: RunProgress, status: int, peak_bytes: int
) -> str:
    """Return the launcher's last lines: results, where the files are, and the next commands.

    Figures that the run did not produce are left out.
    """
    taken = start_step if progress.last_step is None else progress.last_step
    state = "finished" if status == 0 else "was interrupted" if status >= 128 else "failed"
    length = f" after {taken} of {config.run.max_steps} steps" if config.run.max_steps else " (evaluation only)"
    lines = ["", f"{config.run.name} {state}{length}", *_evaluations(run_dir, progress), *_rewards(progress)]
    if peak_bytes:
        lines.append(f"  memory      {gib(peak_bytes)} at most in all processes")
    if run_dir.final.is_dir() and status == 0 and config.run.max_steps:
        lines.append(f"  model       {run_dir.final} (Hugging Face format)")
    if progress.joint_model is not None and status == 0:
        lines.append(f"  joint model {progress.joint_model}")
    lines += [f"  run folder  {run_dir.root}", "", "next:"]
    if status != 0 and config.run.max_steps:
        cause = "" if status >= 128 else "once the cause is mended, "
        then = _resume_text(run_dir, taken, config.run.max_steps)
        lines.append(f"  {cause}the same command with --resume   {then}")
    lines += [f"  {COMPOSER} {command}" for command in _looks(config.run_directory, run_dir)]
    return "\n".join(lines)


def _looks(folder: Path, run_dir: RunDir) -> list[str]:
    """Return the commands that have something to show of the run."""
    where = shlex.quote(str(folder))
    page = f"   (or open {run_dir.root / 'report.html'})" if (run_dir.root / "report.html").is_file() else ""
    flags = {"": "step_*", " --failed": "failed", " --eval": "eval_*"}
    listed = [flag for flag, name in flags.items() if any(run_dir.root.glob(f"rollouts/{name}.jsonl"))]
    chat = [f"chat {where}"] if run_dir.final.is_dir() else []
    return [f"view {where}{page}", f"report {where}", *(f"rollouts {where}{flag}" for flag in listed[:1]), *chat]


def _rewards(progress: RunProgress) -> list[str]:
    rewards = progress.rewards()
    if not rewards:
        return []
    if len(rewards) < TREND_STEPS:
        count = pluralize(len(rewards), "step")
        return [f"  training    mean reward {fmean(rewards):.3f} of {count}; too few for a trend"]
    first, last = ends(rewards)
    return [
        f"  training    mean reward of the first {pluralize(len(first), 'step')} {fmean(first):.3f}, "
        f"of the last {pluralize(len(last), 'step')} {fmean(last):.3f}  {sparkline(rewards)}"
    ]


def _evaluations(run_dir: RunDir, progress: RunProgress) -> list[str]:
    """Return held-out scores, with 95 % intervals over tasks."""
    scored = {step: scores for step, scores in eval_scores(run_dir).items() if scores}
    if not scored:
        shown = sorted(progress.evals.items())
        return [f"  held-out    after step {step}: {eval_text(figures)}" for step, figures in shown]
    first, last = min(scored), max(scored)
    before = mean_interval(scored[first])
    lines = [f"  held-out    {before.text()} after step {first}, over {pluralize(before.count, 'task')}"]
    if last != first:
        lines.append(f"              {mean_interval(scored[last]).text()} after step {last}")
        if scored[first].keys() & scored[last].keys():
            change = difference_interval(scored[first], scored[last])
            unclear = change.low is None or change.high is None or change.low <= 0 <= change.high
            note = ": no clear change" if unclear else ""
            lines.append(f"              change {change.text(sign=True)}, paired by task{note}")
    return lines


def _resume_text(run_dir: RunDir, taken: int, max_steps: int) -> str:
    saved = max(run_dir.complete_checkpoints(), default=None)
    if saved is None:
        return "start over: " + (
            f"no checkpoint has the {pluralize(taken, 'step')} taken" if taken else "nothing was trained yet"
        )
    if saved == max_steps and not run_dir.final.is_dir():
        evaluated = run_dir.eval_rollouts(saved).is_file() or not run_dir.eval_rollouts(0).is_file()
        return "writes the missing final/" if evaluated else "runs the last evaluation and writes final/"
    again = f"; {pluralize(taken - saved, 'step')} after it must be repeated" if taken > saved else ""
    return f"continue after step {saved}{again}"
