"""The composer commands on run directories written here, and its refusals."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from composer_prime.cli import eval_command, main, report_command, rollouts_command
from composer_prime.config.load import dump, resolve
from composer_prime.console import INTERRUPTED, console_main
from composer_prime.errors import ComposerError, ConfigError
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.stats.intervals import difference_interval, mean_interval

ROOT = Path(__file__).parents[2]


def rollout(step: int, name: str, reward: float | None, **more) -> dict:
    turns = [
        {"role": "user", "text": "Add 1 and 2.", "token_count": 9, "error": None, "hint": None, "tool_calls": []},
        {"role": "assistant", "text": "", "token_count": 7, "tool_calls": [{"name": "add", "arguments": "{}"}]},
        {"role": "tool", "text": "Tool not found: add", "token_count": 5, "error": "Tool not found: add"},
    ]
    return {
        "step": step,
        "status": "trained" if reward is not None else "failed",
        "source": "toolsmith",
        "task_id": f"task-{name}",
        "rollout_id": name,
        "expected": "3",
        "reward": reward,
        "advantage": 0.5,
        "parts": {"right": reward, "short": 0.1} if reward is not None else {},
        "policy_versions": [1, 2],
        "turns": turns,
        "error": None if reward is not None else {"kind": "timeout", "message": "took 300 s"},
        "cost": {"sampled_tokens": 7},
        **more,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Six steps, rollouts of two of them, evaluations of steps 0 and 6."""
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.json").write_text("{}")
    metrics = MetricsFile(tmp_path / "metrics.jsonl", "trainer")
    for step in range(1, 7):
        metrics.log(step, {"loss/total": 0.1, "reward/mean": step / 10, "policy/staleness_max": 1, "time/step_s": 2.0})
    write(tmp_path, "step_000005", [rollout(5, "g1-0", 1.0), rollout(5, "g1-1", 0.0)])
    write(tmp_path, "step_000006", [rollout(6, "g2-0", 0.25), rollout(6, "g2-1", None)])
    for step, reward in ((0, 0.0), (6, 1.0)):
        rows = [rollout(step, f"e{task}", reward if task % 2 else 0.0, task_id=f"t{task}") for task in range(8)]
        write(tmp_path, f"eval_{step:06d}", rows)
    return tmp_path


def write(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / "rollouts" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def output(capsys, command, *words: str) -> str:
    assert command.main(list(words)) == 0
    return capsys.readouterr().out


def test_report_shows_curve_evaluations_and_change(run_dir, capsys):
    # Reward bins, the means of the first and last steps (none in both), held-out intervals with the paired change.
    text = output(capsys, report_command, str(run_dir))
    assert "first 3 0.200, last 3 0.500" in text
    assert ["6", "0.600"] in [line.split()[:2] for line in text.splitlines()]
    assert "after     6 steps  0.500" in text and "change +0.500" in text


def test_bins_of_the_report_have_equal_sizes(run_dir, capsys, monkeypatch):
    # But for the last one, which is shorter where they do not fit.
    monkeypatch.setattr(report_command, "_ROWS", 4)
    rows = [line.split()[:3] for line in output(capsys, report_command, str(run_dir)).splitlines() if " - " in line]
    assert rows == [["1", "-", "2"], ["3", "-", "4"], ["5", "-", "6"]]


@pytest.mark.parametrize("command", [report_command, rollouts_command])
def test_lines_fit_the_terminal(command, run_dir, capsys, monkeypatch):
    # Words stay whole, such as the run's path, and so do rows of tables. A pipe gets whole lines.
    whole = output(capsys, command, str(run_dir))
    monkeypatch.setenv("COLUMNS", "60")
    lines = output(capsys, command, str(run_dir)).splitlines()
    text = [line.strip() for line in lines[:-1] if line.strip().count("  ") <= 3]
    assert all(len(line) <= 60 or " " not in line for line in text)
    assert " ".join(whole.split()) == " ".join(" ".join(lines).split())


def test_report_of_a_run_that_has_not_trained(tmp_path, capsys):
    # No step yet is said, not a division by zero.
    (tmp_path / "config.json").write_text("{}")
    assert "no optimizer step yet" in output(capsys, report_command, str(tmp_path))


def test_rollouts_lists_the_newest_step_and_filters(run_dir, capsys):
    # Filters by reward, task and failure; failures say why.
    assert "2 of 2 rollouts" in output(capsys, rollouts_command, str(run_dir))
    assert "g1-0" in (text := output(capsys, rollouts_command, str(run_dir), "--all", "--min-reward", "0.5"))
    assert "1 of 1" in text
    assert "toolsmith/task-g1-0  Add 1 and 2. (expected 3)" in text
    assert "FAILED: took 300 s" in output(capsys, rollouts_command, str(run_dir), "--all", "--failed")
    assert "1 of 1" in output(capsys, rollouts_command, str(run_dir), "--eval", "--task", "t3")


def test_rollouts_lists_what_the_monitor_found(run_dir, capsys):
    # --hacks shows every step's findings with rule, place and evidence, and leaves out mere notes and clean rollouts.
    found = {"rule": "process-exit", "severity": "hack", "place": "m.py:3", "evidence": "os._exit(0)"}
    note = {**found, "rule": "git-log", "severity": "note"}
    rows = [
        rollout(7, "g7-0", 0.0, verdict={"policy": "zero", "hack": True, "findings": [found, note], "count": 2}),
        rollout(7, "g7-1", 1.0, verdict={"policy": "none", "hack": False, "findings": [note], "count": 1}),
    ]
    write(run_dir, "step_000007", [*rows, rollout(7, "g7-2", 1.0, verdict=None)])
    text = output(capsys, rollouts_command, str(run_dir), "--hacks")
    assert "g7-0" in text and "hack process-exit at m.py:3: os._exit(0)" in text
    assert "git-log" not in text and "g7-1" not in text and "1 of 1 rollout of step 7;" in text
    assert "monitor          hack process-exit" in output(capsys, rollouts_command, str(run_dir), "g7-0")


def test_rollouts_shows_one_turn_by_turn(run_dir, capsys):
    # Tool calls and errors are visible.
    text = output(capsys, rollouts_command, str(run_dir), "g1-0")
    assert "[0] user, 9 tokens" in text and "-> add({})" in text and "[2] tool, 5 tokens, a failed call" in text
    assert text.count("Tool not found: add") == 1


ADD_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "c": True}, "required": ["a"]}


def test_a_rollout_shows_its_tools_and_says_each_error_once(run_dir, capsys):
    # The tools that the model was offered, figures as text, equal tries once, the traceback to its last frame.
    failure = {"kind": "task", "message": "KeyError: 'x'", "where": "env.py:7, in right", "detail": "line 7, in right"}
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.\nMore.", "parameters": ADD_SCHEMA}}
    row = rollout(7, "g3-0", None, error=failure, failed_attempts=[failure, failure], tools=[tool], group=3)
    write(run_dir, "failed", [row])
    text = output(capsys, rollouts_command, str(run_dir), "g3-0")
    assert "add(a, b?, c?)  Adds." in text
    assert text.count("KeyError") == 1 and "3 x KeyError: 'x' (env.py:7, in right)" in text
    assert "line 7, in right" in text
    assert "{'" not in text and "policy_versions  1, 2" in text and "cost             sampled_tokens 7" in text


def test_failed_rollouts_are_listed_before_the_batch_of_their_step(run_dir, capsys):
    # rollouts/failed.jsonl has them as they end; --step and --eval choose among them.
    failure = {"kind": "task", "message": "KeyError: 'x'", "where": "env.py:7, in right"}
    rows = [rollout(step, f"g{step}-0", None, error=failure, group=step) for step in (1, 2)]
    write(run_dir, "failed", [*rows, rollout(0, "eval0-s-0-0", None, error=failure, group=None)])
    assert "FAILED: KeyError: 'x' (env.py:7, in right)" in output(capsys, rollouts_command, str(run_dir), "--failed")
    assert "1 of 1 rollout of step 2;" in output(capsys, rollouts_command, str(run_dir), "--failed", "--step", "2")
    assert "eval0-s-0-0" in output(capsys, rollouts_command, str(run_dir), "--failed", "--eval")


def test_rollouts_refuses_what_is_not_there(run_dir, tmp_path):
    # Unknown id, step and folder each have a message; a folder of run directories names them.
    (tmp_path / "joint" / "peer-a").mkdir(parents=True)
    (tmp_path / "joint" / "peer-a" / "config.json").write_text("{}")
    for words, said in (
        ([str(run_dir), "nope"], "nope"),
        ([str(run_dir), "--step", "99"], "steps 5 to 6"),
        ([str(tmp_path / "elsewhere")], "config.json"),
        ([str(tmp_path / "joint")], "peer-a"),
    ):
        with pytest.raises(ConfigError, match=said):
            rollouts_command.main(words)


def test_eval_table_compares_two_models_task_by_task():
    # The paired interval is narrower than the two means' overlap suggests, and has width for a constant change too.
    first = {f"toolsmith/{task}": [float(task % 2)] for task in range(40)}
    second = {name: [value[0] + 0.25] for name, value in first.items()}
    text = "\n".join(eval_command.eval_table({"base": first, "final": second}))
    assert "   40  +0.250 [+0.1" in text
    change, level = difference_interval(first, second), mean_interval(first)
    assert change.count == 40 and change.low is not None and change.high is not None and change.low < 0.25 < change.high
    assert level.low is not None and level.high is not None and change.high - change.low < level.high - level.low


def test_eval_names_the_tasks_that_flipped():
    # A task is solved from the threshold on; tasks that only one model has are in neither list.
    first = {"a/one": [0.0, 1.0], "a/two": [1.0], "a/three": [1.0], "a/four": [0.0], "a/only": [1.0]}
    second = {"a/one": [1.0, 1.0], "a/two": [1.0], "a/three": [0.5], "a/four": [0.5]}
    lines = eval_command.eval_table({"base": first, "final": second})
    assert lines[-4:] == [
        "  1 task solved by final, not by base",
        "    one",
        "  1 task solved by base, not by final",
        "    three",
    ]
    lines = eval_command.eval_table({"base": first, "final": second}, {"a/one": "Why? -> So."})
    assert lines[-3] == "    one  Why? -> So."
    many = {f"a/t{task}": [1.0] for task in range(20)}
    lines = eval_command.eval_table({"base": {task: [0.0] for task in many}, "final": many})
    assert lines[-2] == "    and 8 more"


def test_eval_of_a_run_directory_needs_no_configuration(tmp_path):
    # Its own configuration counts, without what made it continue, replace or join others.
    words = ["@", str(ROOT / "configs/a1.toml"), "--run.max_steps", "6", "--run.overwrite", "true"]
    (tmp_path / "config.json").write_text(dump(resolve(words)))
    (tmp_path / "run_id").write_text("run-1")
    run = eval_command.run_of_models(["tiny", str(tmp_path)])
    ready = eval_command.evaluation_config(eval_command.words_of_run(run, []))
    assert (ready.run.max_steps, ready.run.overwrite, ready.diloco) == (0, False, None)
    with pytest.raises(ConfigError, match="tiny"):
        eval_command.run_of_models(["tiny"])


def test_eval_refuses_a_configuration_without_held_out_tasks(tmp_path):
    # The remedy names the key.
    path = tmp_path / "bare.toml"
    path.write_text((ROOT / "configs/a1.toml").read_text().replace("eval_taskset", "# eval_taskset"))
    with pytest.raises(ConfigError, match="eval_taskset"):
        eval_command.evaluation_config(["@", str(path)])


def test_eval_looks_for_every_model_before_it_evaluates_one(tmp_path):
    # A typo in the second model is said at once, not after the first one's minutes.
    with pytest.raises(ComposerError, match="no folder"):
        eval_command.main(["tiny", str(tmp_path / "nothere"), "@", str(ROOT / "configs/a0.toml")])


def test_eval_splits_models_from_the_configuration():
    # Models first, then the configuration's words.
    assert eval_command.split_models(["tiny", "out/final", "@", "f.toml"]) == (["tiny", "out/final"], ["@", "f.toml"])
    for words in (["@", "f.toml"], ["tiny", "tiny", "@", "f.toml"]):
        with pytest.raises(ConfigError):
            eval_command.split_models(words)


@pytest.mark.process
def test_a_reader_that_leaves_early_sees_no_traceback(run_dir):
    # `composer rollouts RUN | head -1`, with or without 2>&1: no message; the status is that of a closed pipe.
    write(run_dir, "step_000006", [rollout(6, f"g{index}", 0.5) for index in range(5000)])
    command = [sys.executable, "-m", "composer_prime.cli.main", "rollouts", str(run_dir), "--limit", "5000"]
    for errors in (subprocess.PIPE, subprocess.STDOUT):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT)
        assert process.stdout.readline().split()[:2] == [b"step", b"rollout"]
        process.stdout.close()
        assert process.wait(60) == 141
        assert errors == subprocess.STDOUT or process.stderr.read() == b""


@pytest.mark.process
def test_unknown_command_gets_a_suggestion():
    # Exit status 2, a did-you-mean, the list of commands.
    code = "import sys; sys.argv = ['composer', 'reprot']; from composer_prime.cli.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "did you mean report?" in done.stderr and "doctor" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("module", ["trainer", "orchestrator", "inference", "diloco", "composer_prime.cli"])
def test_every_console_script_prints_its_version(module):
    code = f"import sys; sys.argv = ['{module}', '--version']; from {module}.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"composer-prime {version('composer-prime')}\n")


# Every flag of every help has its meaning beside it or below it.
@pytest.mark.parametrize("name", [*main.COMMANDS, "ladder run", *(f"tasks {each}" for each in ("make", "import"))])
def test_every_option_is_explained(name, capsys):
    command = name if name in main.COMMANDS else name.split()[0]
    with suppress(SystemExit):
        importlib.import_module(main.COMMANDS[command][0]).main([*name.removeprefix(command).split(), "--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: composer {name}")
    text = said.partition("options:\n")[2].partition("\n\n")[0]
    starts = re.split(r"\n  (?=\S)", text.removeprefix("  "))
    assert text and all(re.search(r"\S(  +|\n +)\S", start) for start in starts), starts


# Ctrl-C ends a command with one line and its own status.
def test_an_interrupted_command_says_so(capsys):
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert console_main(interrupted) == INTERRUPTED == 130
    assert capsys.readouterr().err == "\ninterrupted\n"
