"""What a person sees: one line a step, and the summary."""

from __future__ import annotations

import json
import shlex
import time

from composer_prime.console import COMPOSER
from composer_prime.monitor.progress import RunProgress
from composer_prime.run.run_dir import RunDir
from tests.configs_made import config_of
from trainer.launcher.view import View, channels_text, eval_text, run_summary, step_line


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
    View(config_of()).event("\x1b]0;title\x07 one\n\ttwo\x9b2J \x7f é")
    assert capsys.readouterr().out.endswith("␛]0;title␇ one\n\ttwo\ufffd2J ␡ é\n")


def test_channels_say_their_figures_only_where_they_are_on():
    # Every line has counts of turns and pairs; only the losses tell that a channel is on.
    (off,) = RunProgress().update([line(1, **{"sdpo/turns": 0.0, "dpo/pairs": 0.0})])
    assert channels_text(off) == ""
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
    progress, view = RunProgress(), View(config_of())
    fresh = progress.update([line(step, **joint, **{"diloco/outer_step": (step + 1) // 2}) for step in (1, 2, 3, 4)])
    view.refresh(progress, fresh)
    said = [text.partition("] ")[2] for text in capsys.readouterr().out.splitlines() if "joint run" in text]
    assert said == [f"  joint run: round {n}, 2 peers, 3.1 MB sent, waited 0.4 s for it" for n in (1, 2)]
    resumed = View(config_of())
    resumed.begin(progress)
    resumed.refresh(progress, fresh[-1:])
    assert "joint run" not in capsys.readouterr().out


def test_the_summary_names_the_joint_model_of_a_run_that_finished(tmp_path):
    # A run that was interrupted has no final model, whatever a run before it in the same folder ended with.
    progress = RunProgress()
    progress.update(
        [line(4), {"step": 4, "role": "trainer", "diloco/final_outer_step": 2, "diloco/final_hash": "0badcafe"}]
    )
    config, run_dir = config_of(), RunDir(tmp_path)
    finished, interrupted = (run_summary(config, run_dir, 4, progress, status, 0) for status in (0, 130))
    assert "  joint model outer step 2, hash 0badcafe, equal on every peer that" in finished
    assert "joint model" not in interrupted


# After its last step a stopped run lacks what comes then, no step.
def test_a_stop_after_the_last_step_leaves_only_the_model(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.checkpoint(4).mkdir(parents=True)
    (run_dir.checkpoint(4) / "COMPLETE").touch()
    config = config_of()
    only_final = run_summary(config, run_dir, 4, RunProgress(), 143, 0)
    (tmp_path / "rollouts").mkdir()
    run_dir.eval_rollouts(0).touch()
    not_evaluated = run_summary(config, run_dir, 4, RunProgress(), 143, 0)
    assert "with --resume   writes the missing final/" in only_final
    assert "with --resume   runs the last evaluation and writes final/" in not_evaluated


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
    config = config_of()
    lines = run_summary(config, run_dir, 0, progress, 0, 0).splitlines()[2:]
    assert lines[0].startswith("  held-out    0.000 [") and lines[0].endswith("after step 0, over 40 tasks")
    assert lines[1].startswith("              0.500 [") and lines[2].startswith("              change +0.500 [+0.")
    assert lines[2].endswith("], paired by task")
    assert lines[3] == "  training    mean reward 0.313 of 3 steps; too few for a trend"
    progress.update([line(step, **{"reward/mean": step / 10}) for step in range(1, 11)])
    assert "of the first 5 steps 0.300, of the last 5 steps 0.800" in run_summary(config, run_dir, 0, progress, 0, 0)


def test_a_resumed_run_shows_only_what_is_new(capsys):
    # Evaluations of earlier starts were shown then; the next one is news.
    view, progress = View(config_of()), RunProgress()
    progress.update([{"step": 0, "time": 1.0, "role": "orchestrator", "eval/a/reward_mean": 0.25}])
    view.begin(progress)
    view.refresh(progress, [])
    assert capsys.readouterr().out == ""
    progress.update([{"step": 2, "time": 2.0, "role": "orchestrator", "eval/a/reward_mean": 0.75}])
    view.refresh(progress, [])
    assert capsys.readouterr().out.count("eval after step") == 1


def test_a_wait_that_follows_the_one_told_of_is_said_too(capsys, monkeypatch):
    # A new subject is said at once; how far the same one has come only after a pause.
    monkeypatch.setattr("trainer.launcher.view.FIRST_WAIT_S", 0.0)
    view, progress = View(config_of()), RunProgress()
    for what in ("the environments: loading", "evaluation of step 0: 1 of 8", "evaluation of step 0: 2 of 8"):
        progress.update([{"step": 0, "time": time.time() - 7, "role": "orchestrator", "waiting_for": what}])
        view.refresh(progress, [])
    said = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    waited = ("the environments: loading", "evaluation of step 0: 1 of 8")
    assert said == [f"orchestrator has waited 7 s for {what}" for what in waited]


def test_eval_text_names_failures_only_when_there_are_some():
    # Rollouts that failed are left out of the mean, so they must be visible.
    assert eval_text({"a/reward_mean": 0.5, "a/failed": 0.0}) == "a/reward_mean 0.500"
    assert "a/failed 3" in eval_text({"a/reward_mean": 0.5, "a/failed": 3.0})


def test_ten_steps_have_a_mean_and_fewer_claim_no_trend(capsys):
    # Each step's line has the time left; the mean of ten steps stands beside every tenth.
    config = config_of(run={"max_steps": 20})
    progress, view = RunProgress(), View(config)
    for step in range(1, 11):
        view.refresh(progress, progress.update([line(step, **{"reward/mean": step / 10})]))
    shown = capsys.readouterr().out.splitlines()
    assert "left" not in shown[0] and shown[1].endswith("0m 18s left")
    assert shown[-1].endswith("0m 10s left  (mean reward of 10 steps 0.550)")
    assert sum("mean reward" in text for text in shown) == 1


# What comes next are commands that have something to show: no chat without a model, no list without rollouts.
def test_the_summary_offers_what_works(tmp_path):
    config, run_dir = config_of(), RunDir(tmp_path)

    def offered(status: int) -> list[str]:
        lines = run_summary(config, run_dir, 0, RunProgress(), status, 0).partition("next:")[2].splitlines()
        return [line.partition("composer ")[2].replace(str(config.run_directory), "RUN") for line in lines[2:]]

    assert offered(1) == ["view RUN", "report RUN"]
    (tmp_path / "rollouts").mkdir()
    run_dir.failed_rollouts.touch()
    assert offered(1) == ["view RUN", "report RUN", "rollouts RUN --failed"]
    run_dir.rollouts(1).touch()
    run_dir.final.mkdir()
    assert offered(1) == ["view RUN", "report RUN", "rollouts RUN", "chat RUN"]


def test_printed_commands_can_be_copied(tmp_path):
    # A folder with blanks and signs of the shell is quoted.
    config = config_of(run={"output_dir": str(tmp_path / "a b&c")})
    run_dir = RunDir(config.run_directory)
    text = run_summary(config, run_dir, 0, RunProgress(), 1, 0)
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith(f"  {COMPOSER} ")]
    assert commands and all(str(config.run_directory) in words for words in commands)
