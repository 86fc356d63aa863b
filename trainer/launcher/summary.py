"""The launcher's last lines: rewards and evaluations, where the files are, and the next commands."""

from __future__ import annotations

from statistics import fmean

from composer_prime.console import gib, pluralize
from composer_prime.monitor.progress import RunProgress, ends, sparkline
from composer_prime.monitor.rollouts import eval_scores
from composer_prime.run.run_dir import RunDir
from composer_prime.stats.intervals import difference_interval, mean_interval
from trainer.launcher.prepare import Prepared
from trainer.launcher.view import eval_text


def run_summary(prepared: Prepared, progress: RunProgress, status: int, peak_bytes: int) -> str:
    """Return the lines; figures that the run did not produce are left out."""
    config, run_dir = prepared.config, prepared.run_dir
    taken = progress.last.step if progress.last else prepared.start_step
    state = "finished" if status == 0 else "was interrupted" if status >= 128 else "failed"
    length = f" after {taken} of {config.run.max_steps} steps" if config.run.max_steps else " (evaluation only)"
    lines = ["", f"{config.run.name} {state}{length}"]
    lines += _rewards(progress)
    lines += _evaluations(prepared, progress)
    if peak_bytes:
        lines.append(f"  memory      {gib(peak_bytes)} at most, all processes together")
    if run_dir.final.is_dir() and status == 0 and config.run.max_steps:
        lines.append(f"  model       {run_dir.final} (Hugging Face format)")
    if progress.ended is not None and status == 0:
        lines.append(f"  joint model {progress.ended.text}")
    lines.append(f"  everything  {run_dir.root}")
    return "\n".join(lines + _next(prepared, status, taken))


def _rewards(progress: RunProgress) -> list[str]:
    rewards = progress.rewards()
    first, last = ends(rewards)
    if not first:
        return [f"  reward      {rewards[0]:.3f}"] if rewards else []
    return [
        f"  reward      first {pluralize(len(first), 'step')} {fmean(first):.3f}, "
        f"last {pluralize(len(last), 'step')} {fmean(last):.3f}  {sparkline(rewards)}"
    ]


def _evaluations(prepared: Prepared, progress: RunProgress) -> list[str]:
    """Return held-out scores before and after, with 95 % intervals over tasks."""
    scored = {step: scores for step, scores in eval_scores(prepared.run_dir).items() if scores}
    if not scored:
        shown = sorted(progress.evals.items())
        return [f"  eval        after step {step}: {eval_text(figures)}" for step, figures in shown]
    first, last = min(scored), max(scored)
    before = mean_interval(scored[first])
    lines = [f"  eval        after step {first}: {before.text()} over {before.count} held-out tasks"]
    if last != first:
        lines.append(f"              after step {last}: {mean_interval(scored[last]).text()}")
        if scored[first].keys() & scored[last].keys():
            change = difference_interval(scored[first], scored[last])
            lines.append(f"              change {change.text(sign=True)}, paired by task")
    return lines


def _next(prepared: Prepared, status: int, taken: int) -> list[str]:
    where = prepared.config.run_directory
    lines = ["", "next:"]
    if status != 0 and prepared.config.run.max_steps:
        lines.append(f"  the same command with --resume   {_resume_text(prepared.run_dir, taken)}")
    lines.append(f"  uv run composer report {where}")
    lines.append(f"  uv run composer rollouts {where}")
    return lines


def _resume_text(run_dir: RunDir, taken: int) -> str:
    """Say where a resume would start; `taken` is the last step that was trained."""
    saved = (run_dir.complete_checkpoints() or [None])[-1]
    if saved is None:
        return "start over: " + (
            f"no checkpoint holds the {pluralize(taken, 'step')} taken" if taken else "nothing was trained yet"
        )
    again = f"; {pluralize(taken - saved, 'step')} after it must be taken again" if taken > saved else ""
    return f"go on after step {saved}{again}"
