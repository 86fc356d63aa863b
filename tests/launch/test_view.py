"""What a person sees: the live panel on a terminal, one line a step elsewhere."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_prime.config import Config
from composer_prime.console import clock
from composer_prime.monitor.progress import RunProgress
from composer_prime.run.run_dir import RunDir
from trainer.launcher.prepare import Prepared
from trainer.launcher.view import PlainView, channels_text, eval_text, panel_rows, round_text, run_summary, step_line

CONFIG = {
    "run": {"name": "one", "max_steps": 4},
    "model": {"path": "tiny", "max_context": 512},
    "orchestrator": {"source": [{"name": "a", "taskset": {"id": "x"}}], "sampling": {"max_tokens": 64}},
}


def line(step: int, **more) -> dict:
    return {"step": step, "time": 100.0 + step, "role": "trainer", "loss/total": 0.25, **more}


def test_step_line_leaves_out_what_is_missing():
    # A figure that the trainer does not report is absent, not zero.
    (bare,) = RunProgress().update([line(2)])
    assert step_line(bare, 4) == "step 2/4  loss +0.2500"
    more = {"reward/mean": 0.5, "reward/std": 0.5, "tokens/trained": 100, "time/step_s": 2.0, "time/wait_s": 0.5}
    (full,) = RunProgress().update([line(2, **more)])
    assert step_line(full, 4) == "step 2/4  reward 0.500 ±0.50  loss +0.2500  50 tok/s  2.0 s (waited 0.5 s)"


def test_text_of_a_model_cannot_steer_the_terminal(capsys):
    # Escape sequences are shown as symbols; lines and tabs stay what they are.
    PlainView(Config.model_validate(CONFIG)).event("\x1b]0;title\x07 one\n\ttwo\x9b2J \x7f é")
    assert capsys.readouterr().out.endswith("␛]0;title␇ one\n\ttwo\ufffd2J ␡ é\n")


def test_channels_say_their_figures_only_where_they_are_on():
    # Every line has counts of turns and pairs; only the losses tell that a channel is on.
    (off,) = RunProgress().update([line(1, **{"sdpo/turns": 0.0, "dpo/pairs": 0.0})])
    assert channels_text(off) == "" and off.joint is None
    (none,) = RunProgress().update([line(1, **{"loss/sdpo": 0.0, "sdpo/turns": 0.0, "dpo/pairs": 0.0})])
    assert channels_text(none) == "hints: 0 turns"
    hints = {"loss/sdpo": 0.03, "sdpo/turns": 41.0, "sdpo/jsd": 0.0312, "sdpo/endorsed": 0.5}
    (both,) = RunProgress().update(
        [line(1, **hints, **{"loss/replay_dpo": 0.6, "dpo/pairs": 8.0, "dpo/accuracy": 0.875})]
    )
    assert channels_text(both) == "hints: 41 turns, jsd 0.0312, 50% endorsed  teachers: 8 pairs, accuracy 0.88"


def test_a_joint_run_tells_of_each_round_once(capsys):
    # Steps between two rounds repeat the last one's figures; the panel keeps them, lines say them when they are new.
    joint = {"diloco/participants": 2, "diloco/bytes_sent": 3_140_000, "diloco/sync_s": 0.42}
    progress, view = RunProgress(), PlainView(Config.model_validate(CONFIG))
    fresh = progress.update([line(step, **joint, **{"diloco/outer_step": (step + 1) // 2}) for step in (1, 2, 3, 4)])
    view.refresh(progress, fresh, None)
    said = [text.partition("] ")[2] for text in capsys.readouterr().out.splitlines() if "joint run" in text]
    assert said == [f"  joint run: round {n}, 2 peers, 3.1 MB sent, waited 0.4 s for it" for n in (1, 2)]
    rows = dict(panel_rows(Config.model_validate(CONFIG), progress, time.time(), None))
    assert progress.last and progress.last.joint and rows["joint run"] == round_text(progress.last.joint)
    resumed = PlainView(Config.model_validate(CONFIG))
    resumed.begin(progress)
    resumed.refresh(progress, fresh[-1:], None)
    assert "joint run" not in capsys.readouterr().out


def test_the_summary_names_the_joint_model_of_a_run_that_finished(tmp_path):
    # A run that was interrupted has no final model, whatever a run before it in the same folder ended with.
    progress = RunProgress()
    progress.update(
        [line(4), {"step": 4, "role": "trainer", "diloco/final_outer_step": 2, "diloco/final_hash": "0badcafe"}]
    )
    with (tmp_path / "lock").open("wb") as lock:
        prepared = Prepared(
            run_dir=RunDir(tmp_path), config=Config.model_validate(CONFIG), start_step=4, notes=(), lock=lock
        )
        finished, interrupted = (run_summary(prepared, progress, status, 0) for status in (0, 130))
    assert "  joint model outer step 2, hash 0badcafe, equal on every peer that" in finished
    assert "joint model" not in interrupted


# After its last step a stopped run lacks what comes then, no step.
def test_a_stop_after_the_last_step_leaves_only_the_model(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.checkpoint(4).mkdir(parents=True)
    (run_dir.checkpoint(4) / "COMPLETE").touch()
    with (tmp_path / "lock").open("wb") as lock:
        config = Config.model_validate(CONFIG)
        prepared = Prepared(run_dir=run_dir, config=config, start_step=4, notes=(), lock=lock)
        only_final = run_summary(prepared, RunProgress(), 143, 0)
        (tmp_path / "rollouts").mkdir()
        run_dir.eval_rollouts(0).touch()
        not_evaluated = run_summary(prepared, RunProgress(), 143, 0)
    assert "with --resume   writes the missing final/" in only_final
    assert "with --resume   runs the last evaluation and writes final/" in not_evaluated


def test_panel_shows_progress_pace_and_who_waits():
    # Progress bar with the time left, rewards, evaluation with its interval, memory, waits.
    progress = RunProgress()
    waits = {"step": 2, "time": time.time() - 7, "role": "orchestrator", "waiting_for": "batch 3: 1 of 8 groups"}
    evaluated = {"eval/a/reward_mean": 0.5, "eval/a/reward_mean_low": 0.4, "eval/a/reward_mean_high": 0.6}
    progress.update([line(1, **{"reward/mean": 0.1}), line(2, **{"reward/mean": 0.3}), {**waits, **evaluated}])
    rows = dict(panel_rows(Config.model_validate(CONFIG), progress, time.time() - 65, 2 << 30))
    assert "step 2/4" in rows["progress"] and "1m 05s" in rows["progress"] and "0m 02s left" in rows["progress"]
    assert rows["reward"] == "0.300"
    assert rows["eval"] == "after step 2: a/reward_mean 0.500 [0.400, 0.600]"
    assert rows["memory"].startswith("2.00 GiB") and rows["orchestrator"] == "waits 7 s for batch 3: 1 of 8 groups"
    assert rows["step"].startswith("2/4  ") and list(rows).index("eval") < list(rows).index("reward")


def test_the_summary_leads_with_the_held_out_figures(tmp_path):
    # Three steps on different tasks show no trend; the paired change of held-out tasks does, with its interval.
    run_dir = RunDir(tmp_path)
    (tmp_path / "rollouts").mkdir()
    for step, reward in ((0, 0.0), (3, 1.0)):
        rows = [
            {"source": "a", "task_id": f"t{task}", "reward": reward if task % 2 else 0.0, "rollout_id": "x"}
            for task in range(40)
        ]
        run_dir.eval_rollouts(step).write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress = RunProgress()
    progress.update([line(step, **{"reward/mean": reward}) for step, reward in ((1, 0.438), (2, 0.3), (3, 0.202))])
    with (tmp_path / "lock").open("wb") as lock:
        prepared = Prepared(run_dir=run_dir, config=Config.model_validate(CONFIG), start_step=0, notes=(), lock=lock)
        lines = run_summary(prepared, progress, 0, 0).splitlines()[2:]
    assert lines[0].startswith("  held-out    0.000 [") and lines[0].endswith("after step 0, over 40 tasks")
    assert lines[1].startswith("              0.500 [") and lines[2].startswith("              change +0.500 [+0.")
    assert lines[2].endswith("], paired by task")
    assert lines[3] == "  training    mean reward 0.313 of 3 steps; too few for a trend"
    progress.update([line(step, **{"reward/mean": step / 10}) for step in range(1, 11)])
    with (tmp_path / "lock").open("wb") as lock:
        prepared = Prepared(run_dir=run_dir, config=Config.model_validate(CONFIG), start_step=0, notes=(), lock=lock)
        assert "of the first 5 steps 0.300, of the last 5 steps 0.800" in run_summary(prepared, progress, 0, 0)


def test_a_resumed_run_shows_only_what_is_new(capsys):
    # Evaluations of earlier starts were shown then; the next one is news.
    view, progress = PlainView(Config.model_validate(CONFIG)), RunProgress()
    progress.update([{"step": 0, "time": 1.0, "role": "orchestrator", "eval/a/reward_mean": 0.25}])
    view.begin(progress)
    view.refresh(progress, [], None)
    assert capsys.readouterr().out == ""
    progress.update([{"step": 2, "time": 2.0, "role": "orchestrator", "eval/a/reward_mean": 0.75}])
    view.refresh(progress, [], None)
    assert capsys.readouterr().out.count("eval after step") == 1


def test_a_wait_that_follows_the_one_told_of_is_said_too(capsys, monkeypatch):
    # A new subject is said at once; how far the same one has come only after a pause.
    monkeypatch.setattr("trainer.launcher.view.FIRST_WAIT_S", 0.0)
    view, progress = PlainView(Config.model_validate(CONFIG)), RunProgress()
    for what in ("the environments: loading", "evaluation of step 0: 1 of 8", "evaluation of step 0: 2 of 8"):
        progress.update([{"step": 0, "time": time.time() - 7, "role": "orchestrator", "waiting_for": what}])
        view.refresh(progress, [], None)
    said = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    waited = ("the environments: loading", "evaluation of step 0: 1 of 8")
    assert said == [f"orchestrator has waited 7 s for {what}" for what in waited]


def test_eval_text_names_failures_only_when_there_are_some():
    # Rollouts that failed are left out of the mean, so they must be visible.
    assert eval_text({"a/reward_mean": 0.5, "a/failed": 0.0}) == "a/reward_mean 0.500"
    assert "a/failed 3" in eval_text({"a/reward_mean": 0.5, "a/failed": 3.0})


def test_clock():
    # Seconds for people.
    assert [clock(5), clock(65), clock(3700)] == ["0m 05s", "1m 05s", "1h 01m"]


@pytest.mark.process
def test_live_panel_on_a_terminal(tmp_path: Path):
    # On a real terminal the panel is drawn and redrawn, and the summary follows it.
    scenario = {"orchestrator": "time.sleep(2.5)", "trainer-0": "log('trainer', 3, **{'loss/total': 1.0})"}
    file = tmp_path / "scenario.json"
    file.write_text(json.dumps(scenario))
    stand = Path(__file__).with_name("stand.py")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(stand), str(tmp_path), str(file), "--monitor.view", "auto"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
    )
    os.close(slave)
    shown, deadline = b"", time.monotonic() + 150
    while time.monotonic() < deadline:
        ready, _, _ = select.select([master], [], [], 0.5)
        try:
            shown += os.read(master, 65536) if ready else b""
        except OSError:
            break
        if not ready and process.poll() is not None:
            break
    assert process.wait(200) == 0
    text = shown.decode(errors="replace")
    assert text.count("Ctrl-C stops") > 1 and "step 3/3" in text and "stand finished" in text


def test_ten_steps_have_a_mean_and_fewer_claim_no_trend(capsys):
    # Each step's line has the time left; the mean of ten steps stands beside every tenth.
    config = Config.model_validate({**CONFIG, "run": {"name": "one", "max_steps": 20}})
    progress, view = RunProgress(), PlainView(config)
    for step in range(1, 11):
        view.refresh(progress, progress.update([line(step, **{"reward/mean": step / 10})]), None)
    shown = capsys.readouterr().out.splitlines()
    assert "left" not in shown[0] and shown[1].endswith("0m 18s left")
    assert shown[-1].endswith("0m 10s left  (mean reward of 10 steps 0.550)")
    assert sum("mean reward" in text for text in shown) == 1
    rows = dict(panel_rows(config, progress, time.time(), None))
    assert rows["reward"].startswith("1.000  mean of 10 steps 0.550")


def test_the_panel_shows_the_start_the_nodes_and_failures():
    # Before the first step it says what has come; later how many nodes serve and how many tries failed.
    config, progress = Config.model_validate(CONFIG), RunProgress()
    progress.update([{"step": 0, "role": "orchestrator", "stage": "environment 'a' has loaded (4 tasks) after 9 s"}])
    assert dict(panel_rows(config, progress, time.time(), None))["start"].endswith("after 9 s")
    figures = {"gateway/nodes": 2, "rollouts/failed/task": 3, "rollouts/failed/timeout": 1}
    progress.update([line(1), {"step": 1, "role": "orchestrator", **figures}])
    rows = dict(panel_rows(config, progress, time.time(), None))
    assert "start" not in rows and rows["nodes"] == "2 connected, 4 failed attempts of rollouts"
