"""The launcher with real processes. Small scripts play the roles; nothing of the launcher is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from stand import CONFIG
from waiting import wait_until

from composer_prime.config.load import resolve
from composer_prime.config.teachers import MODELS_VARIABLE
from composer_prime.run.costs import spent
from composer_prime.run.process import OrphanGuard
from composer_prime.run.run_dir import RunDir
from trainer.launcher.launch import _RunMonitor, prepare
from trainer.launcher.supervise import RoleCommand, RoleProcess, Supervisor, role_commands
from trainer.launcher.view import View

pytestmark = pytest.mark.process

STAND = Path(__file__).with_name("stand.py")
STEADY = "open(f'ready-{os.getpid()}', 'w').close(); time.sleep(300)"
TRAINS = """
for step in (1, 2, 3):
    log('trainer', step, **{'loss/total': 0.1, 'reward/mean': step / 10, 'time/step_s': 0.1, 'tokens/trained': 50})
    time.sleep(0.2)
"""
LINKED = "**{'weights/bytes': 7, 'diloco/bytes_sent': 10 * step, "
SOMEONE_READY = "while not any(name.startswith('ready-') for name in os.listdir()): time.sleep(0.05)\n"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STEADY
GRANDCHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)\n"


class Stand:
    """A launcher process and what it leaves behind."""

    def __init__(self, folder: Path, scenario: dict[str, str], *extra: str) -> None:
        self.folder = folder
        self.run_dir = folder / "outputs" / "stand"
        file = folder / "scenario.json"
        file.write_text(json.dumps(scenario))
        environment = {**os.environ, "STAND_MARK": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, str(STAND), str(folder), str(file), *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def finish(self, timeout_s: float = 150) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def members(self) -> list[psutil.Process]:
        """Every living process that descends from the launcher, found by an inherited environment variable."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get("STAND_MARK") == str(self.folder)
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def wait_for_roles(self, count: int) -> None:
        """Until `count` steady roles say that they are set up."""
        wait_until(lambda: len(list(self.run_dir.glob("ready-*"))) >= count)


@pytest.fixture
def stand(tmp_path: Path):
    made: list[Stand] = []

    def start(scenario: dict[str, str], *extra: str) -> Stand:
        made.append(Stand(tmp_path, scenario, *extra))
        return made[-1]

    yield start
    for each in made:
        for process in each.members():
            process.kill()


def test_finished_run_stops_nodes_and_leaves_nothing(stand):
    # Orchestrator and ranks end with 0: the run is a success, the node is stopped, no process is left.
    run = stand({"orchestrator": SOMEONE_READY, "node-0": GRANDCHILD + STEADY, "trainer-0": TRAINS})
    status, output = run.finish()
    assert status == 0, output
    assert "step 3/3" in output and "stand finished after 3 of 3 steps" in output
    assert "mean reward 0.200 of 3 steps; too few for a trend" in output
    assert run.members() == []


def test_resume_of_a_finished_run_says_so(stand):
    # Nothing is started when all steps are taken and the model is written: the way to train on is named.
    made = (
        "import pathlib\n"
        "for name in ('checkpoints/step_000003/COMPLETE', 'final/config.json'):\n"
        "    path = pathlib.Path(name); path.parent.mkdir(parents=True); path.touch()\n"
    )
    first = stand({"orchestrator": "", "trainer-0": made})
    assert first.finish()[0] == 0
    status, output = stand({"orchestrator": "sys.exit(9)", "trainer-0": "sys.exit(9)"}, "--resume").finish()
    assert status == 0 and "stand is already finished: 3 of 3 steps" in output, output


def test_failing_role_ends_the_run_with_its_last_lines(stand):
    # A rank that dies ends the run: non-zero status, its last message once without the noise before it, nobody left.
    broken = "print('noise\\n' * 30); print('the gradient exploded'); sys.exit(3)"
    run = stand({"orchestrator": GRANDCHILD + STEADY, "node-0": STEADY, "trainer-0": TRAINS, "trainer-1": broken})
    status, output = run.finish()
    assert status == 1
    assert "trainer-1 ended with exit status 3" in output and output.count("the gradient exploded") == 1
    assert "noise" not in output and run.members() == []


def test_an_unexpected_error_leads_and_its_traceback_follows(stand):
    # A traceback names the place, so the end of the log is shown below the error itself.
    status, output = stand({"orchestrator": STEADY, "trainer-0": "raise KeyError('x')"}).finish()
    failure = output.partition("the run failed: ")[2]
    assert status == 1 and failure.startswith("trainer-0 ended with exit status 1: KeyError: 'x'\nthe end of ")
    assert "Traceback (most recent call last)" in failure and "  uv run composer chat" not in output


def test_a_problem_is_shown_and_the_cause_is_the_last_word(stand):
    # What the orchestrator reports of a failed rollout is on the screen; the error ends the output, below the summary.
    text = "KeyError: 'answer' (my_env.py:12, in right)"
    told = dict(role="orchestrator", level="warning", kind="failure", text=text, id="a", count=1, pid=1)
    fails = f"open('events.jsonl', 'a').write(json.dumps({told!r}) + '\\n'); print({text!r}); sys.exit(1)"
    status, output = stand({"orchestrator": fails, "trainer-0": STEADY}).finish()
    assert status == 1
    assert f"] orchestrator: {text}\n" in output and output.count(text) == 2
    assert output.index("stand failed after 0 of 3 steps") < output.index("the run failed: orchestrator")
    assert output.rstrip().endswith(text)


def test_nobody_waits_once_the_roles_have_ended(tmp_path, capsys, monkeypatch):
    # The orchestrator's last line may name a wait. It ends with its process.
    monkeypatch.setattr("trainer.launcher.view.FIRST_WAIT_S", 0.0)
    config = resolve(["@", str(CONFIG), "--run.output_dir", str(tmp_path)])
    prepared = prepare(config)
    wait = {"step": 3, "time": time.time() - 9, "role": "orchestrator", "waiting_for": "evaluation of step 3: 1 of 8"}
    with OrphanGuard(1.0) as guard:
        monitor = _RunMonitor(prepared, View(config))
        supervisor = Supervisor(run_dir=prepared.run_dir, roles=[], guard=guard, config=config, on_event=print)
        prepared.run_dir.metrics.write_text(json.dumps(wait) + "\n")
        monitor.tick(supervisor, ended=True)
        assert "waited" not in capsys.readouterr().out
        assert "orchestrator" not in monitor.progress.waiting
        prepared.run_dir.metrics.write_text(2 * (json.dumps(wait) + "\n"))
        monitor.tick(supervisor)
        assert "orchestrator has waited 9 s for evaluation of step 3" in capsys.readouterr().out
    prepared.lock.close()


def test_a_stop_asks_nothing_of_the_model(tmp_path, monkeypatch):
    # Its size says how long ranks may save. A model that is gone, or on the Hub, must not hold up a stop, or fail it.
    config = resolve(["@", str(CONFIG), "--run.output_dir", str(tmp_path)])
    prepared = prepare(config)
    rank = RoleCommand(name="trainer-0", kind="rank", argv=[sys.executable, "-c", "import time; time.sleep(300)"])
    with OrphanGuard(1.0) as guard:
        run = Supervisor(run_dir=prepared.run_dir, roles=[rank], guard=guard, config=config, on_event=print)
        run.start()
        monkeypatch.delattr("trainer.launcher.supervise.stop_timeout_s")
        run.stop()
    assert not run.children[0].running
    prepared.lock.close()


def test_only_the_cause_shows_its_traceback(tmp_path):
    # A rank that lost another one has a traceback of its own. It would be the last that a user sees.
    config, no_guard, no_process = resolve(["@", str(CONFIG)]), cast("Any", None), cast("Any", None)
    run = Supervisor(run_dir=RunDir(tmp_path), roles=[], guard=no_guard, config=config, on_event=print)
    failed = []
    for name, text in (("trainer-1", "planted"), ("trainer-0", "lost")):
        run.run_dir.log(name).parent.mkdir(exist_ok=True)
        run.run_dir.log(name).write_text(f"Traceback:\n  File {text}.py\nRuntimeError: {text}\n")
        role = RoleCommand(name=name, kind="rank", argv=[])
        failed.append(RoleProcess(role=role, process=no_process, log_offset=0, started=0.0, code=1))
    report = run._report(failed)
    assert report.startswith("trainer-1 ended") and "File planted.py" in report
    assert "File lost.py" not in report and report.endswith("RuntimeError: lost")


def test_orchestrator_is_named_before_the_rank_it_took_down(stand):
    # A rank that loses the orchestrator may end first. The report still begins with the cause.
    failing = "print('no task'); open('failing', 'w').close(); time.sleep(1); sys.exit(1)"
    told = "while not os.path.exists('failing'): time.sleep(0.02)\nprint('told to stop'); sys.exit(1)"
    status, output = stand({"orchestrator": failing, "trainer-0": told}).finish()
    assert status == 1 and output.index("no task") < output.index("told to stop")


def test_dead_node_is_started_again(stand):
    # A node that dies once is restarted and the run succeeds.
    patient = SOMEONE_READY
    flaky = "first = not os.path.exists('seen'); open('seen', 'a').close()\nif first: sys.exit(7)\n" + STEADY
    status, output = stand({"orchestrator": patient, "node-0": flaky, "trainer-0": TRAINS}).finish()
    assert status == 0, output
    assert "node-0 ended with exit status 7; restarting it in 1 s (1 of 5)" in output


def test_node_that_keeps_dying_ends_the_run(stand):
    # The cap of restarts ends the run when no other node is left.
    run = stand({"orchestrator": STEADY, "node-0": "print('no memory'); sys.exit(7)"}, "--inference.max_restarts", "1")
    status, output = run.finish()
    assert status == 1 and "died 2 times and no other node is left" in output and "no memory" in output
    assert run.members() == []


def test_node_with_a_wrong_configuration_is_not_retried(stand):
    # Exit status 2 (usage) of a node fails the run at once.
    status, output = stand({"orchestrator": STEADY, "node-0": "sys.exit(2)"}).finish()
    assert status == 1 and "restarting it" not in output


def test_a_run_goes_on_without_teachers(stand):
    # Teachers that keep dying are started again as often as a node is, and then given up; the run finishes.
    patient = "while len(open('deaths').read()) < 2: time.sleep(0.05)\ntime.sleep(1)"
    dying = "open('deaths', 'a').write('x'); sys.exit(2)"
    run = stand(
        {"teachers": f"open('deaths', 'a').close()\n{dying}", "orchestrator": "time.sleep(1)\n" + patient,
         "node-0": STEADY, "trainer-0": TRAINS.replace("**{", LINKED)},
        "--inference.max_restarts", "1",
    )  # fmt: skip
    status, output = run.finish()
    assert status == 0, output
    used = spent(run.run_dir / "costs.jsonl")
    assert used.process_s > 2 and used.gpu_s == 0 and used.link_bytes == {"weights/bytes": 21, "diloco/bytes_sent": 30}
    assert "teachers ended with exit status 2; gave up after 1 restarts" in output and run.members() == []


@pytest.mark.parametrize("online", [True, False])
def test_the_launcher_serves_local_teachers(tmp_path, online):
    # Only a run that replays online has them, at an address that the orchestrator gets.
    pool = Path(__file__).parents[2] / "configs" / "teachers" / "tiny.toml"
    words = ["@", str(CONFIG), "@", str(pool), "--teachers.online", str(online).lower()]
    roles = {role.name: role for role in role_commands(resolve(words), RunDir(tmp_path / "run"), gpus=0)}
    url = roles["orchestrator"].env.get(MODELS_VARIABLE)
    assert ("teachers" in roles) == (url is not None) == online
    if online:
        argv = roles["teachers"].argv
        served = [argv[index + 1] for index, word in enumerate(argv) if word == "--model"]
        assert served == ["tiny/teacher_a", "tiny/teacher_b", "tiny/teacher_c"]
        assert url == f"http://127.0.0.1:{argv[argv.index('--port') + 1]}/v1"


def test_ctrl_c_stops_everything_with_130(stand):
    # One Ctrl-C: clean stop, status 130, also with a role that ignores SIGTERM.
    run = stand({"orchestrator": GRANDCHILD + STEADY, "node-0": STEADY, "trainer-0": STUBBORN})
    run.wait_for_roles(3)
    run.process.send_signal(signal.SIGINT)
    status, output = run.finish()
    assert status == 130 and "killing it" in output and "--resume" in output
    assert run.members() == []


SAVES = """
def save(*_):
    if not any(name.startswith('told-') for name in os.listdir()):
        os.makedirs('checkpoints/step_000002'); open('checkpoints/step_000002/COMPLETE', 'w').close()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
for step in (1, 2):
    log('trainer', step, **{'loss/total': 0.1})
"""
TOLD = """
def told(*_):
    open(f'told-{os.getpid()}', 'w').close(); sys.exit(143)
signal.signal(ENDS, told)
"""


def test_ranks_save_before_anything_else_is_stopped(stand):
    # The rank's checkpoint is written while orchestrator and node still work; the summary says where --resume goes on.
    ends = {role: f"ENDS = signal.{name}" for role, name in (("orchestrator", "SIGHUP"), ("node-0", "SIGTERM"))}
    run = stand({**{role: number + TOLD + STEADY for role, number in ends.items()}, "trainer-0": SAVES + STEADY})
    run.wait_for_roles(3)
    run.process.send_signal(signal.SIGTERM)
    status, output = run.finish()
    assert status == 143 and "writing a checkpoint, at most 1 s" in output, output
    assert "--resume   continue after step 2\n" in output and len(list(run.run_dir.glob("told-*"))) == 2, output


def test_the_rank_that_failed_first_is_blamed(stand):
    # Rank 1 says what happened and ends slowly; rank 0, which only lost it, ends before: rank 1's words come first.
    wait = "while not os.path.exists({!r}): time.sleep(0.05)\n".format
    lost = f"{wait('failed')}time.sleep(0.1); print('lost rank 1'); open('gone', 'w'); sys.exit(1)"
    first = f"print('no memory left', flush=True); open('failed', 'w')\n{wait('gone')}time.sleep(0.5); sys.exit(1)"
    scenario = {"trainer-0": lost, "trainer-1": first}
    status, output = stand({"orchestrator": STEADY, **scenario}).finish()
    assert status == 1 and "the run failed: trainer-1 " in output, output
    assert output.rindex("no memory left") < output.rindex("lost rank 1")


def test_ranks_are_not_waited_for_where_no_checkpoint_can_be_made(stand):
    # With the orchestrator dead, a rank that would try is killed at once; the summary says what a resume must repeat.
    logged = "log('trainer', 1, **{'loss/total': 0.1})\n"
    words = ("--trainer.checkpoint.stop_timeout_s", "900")
    run = stand({"orchestrator": SOMEONE_READY + "sys.exit(1)", "trainer-0": logged + STUBBORN}, *words)
    status, output = run.finish()
    assert status == 1 and "start over: no checkpoint has the 1 step taken" in output, output
    assert run.members() == []


def test_the_orchestrator_may_wait_for_teachers(stand):
    # Beyond its grace: what teachers were asked may be charged, so the orchestrator gets an attempt's deadline more.
    kind = '{"name": "NAME", "model": "MODEL"}'
    pool = [kind.replace("NAME", name).replace("MODEL", model) for name, model in (("a", "gpt-5"), ("b", "glm-5"))]
    words = ("--grace", "0.2", "--teachers.timeout_s", "250", "--teachers.online", "true")
    answered = "signal.signal(signal.SIGHUP, lambda *_: (time.sleep(1.5), open('answered', 'w').close(), sys.exit(0)))"
    run = stand({"orchestrator": f"{answered}\n{STEADY}"}, *words, "--teachers.teacher", f"[{', '.join(pool)}]")
    run.wait_for_roles(1)
    run.process.send_signal(signal.SIGINT)
    status, output = run.finish()
    assert status == 130 and "waiting for pending answers of teachers, at most 250 s" in output, output
    assert (run.run_dir / "answered").exists(), output


def test_a_reader_that_leaves_does_not_end_the_run(stand):
    # `trainer @ f.toml 2>&1 | head -1`: the run goes on to its end without output.
    trains = "time.sleep(1)" + TRAINS + "open('trained', 'w').close()\n"
    run = stand({"orchestrator": "while not os.path.exists('trained'): time.sleep(0.05)", "trainer-0": trains})
    assert "starting" in run.process.stdout.readline()
    run.process.stdout.close()
    assert run.process.wait(150) == 0 and (run.run_dir / "trained").exists()


def test_second_ctrl_c_kills_at_once(stand):
    # A second Ctrl-C does not wait for the grace period.
    run = stand({"orchestrator": STUBBORN, "trainer-0": STUBBORN}, "--grace", "250")
    run.wait_for_roles(2)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    status, _ = run.finish(100)
    assert status == 130 and run.members() == []


def test_killed_launcher_leaves_no_process(stand):
    # kill -9 of the launcher: roles, stubborn ones and grandchildren in sessions of their own all end.
    run = stand({"orchestrator": GRANDCHILD + STUBBORN, "node-0": STEADY, "trainer-0": STEADY})
    run.wait_for_roles(3)
    run.process.kill()
    run.process.wait()
    wait_until(lambda: run.members() == [])


def test_second_launcher_in_the_same_directory_is_refused(stand, tmp_path):
    # One launcher a run directory, also with --resume.
    run = stand({"orchestrator": STEADY})
    run.wait_for_roles(1)
    status, output = stand({"orchestrator": STEADY}, "--resume").finish()
    assert status == 1 and "another launcher" in output and str(run.process.pid) in output
