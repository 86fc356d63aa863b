"""The lines of `composer report` about time, hints, pairs and joint runs, from metrics written here."""

import json

from composer_prime.cli.report_command import hint_lines, joint_lines, pair_lines, report_run
from composer_prime.monitor.events import EventFile
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.monitor.progress import RunProgress
from composer_prime.run.costs import write_cost
from composer_prime.run.run_dir import RunDir


def trainer_line(step: int, **more) -> dict:
    return {"step": step, "role": "trainer", "loss/total": 0.1, "time/step_s": 10.0, **more}


def round_line(step: int, outer_step: int, peers: str, sent: float, **more) -> dict:
    own = {f"diloco/{peer}/inner_steps": 1 for peer in peers}
    figures = {"diloco/outer_step": outer_step, "diloco/sweep": outer_step // 2, "diloco/sync_s": 0.5}
    return trainer_line(step, **figures, **own, **{"diloco/bytes_sent": sent, "diloco/bytes_received": sent}, **more)


def joined(lines: list[dict]) -> list[str]:
    progress = RunProgress()
    progress.update(lines)
    return joint_lines(lines, progress)


def test_warnings_stand_in_the_report(tmp_path):
    # Information is left out; a repeated event has its count; no event, no section.
    (tmp_path / "config.json").write_text("{}")
    MetricsFile(tmp_path / "metrics.jsonl", "trainer").log(1, {"loss/total": 0.1})
    assert "events" not in "\n".join(report_run(RunDir(tmp_path)))
    file = EventFile(RunDir(tmp_path), "orchestrator")
    file.write("checkpoint", "checkpoint of step 1 is saved")
    for _ in range(10):
        file.write("failure", "a rollout of 's' failed: KeyError", level="warning", where="env.py:3")
    text = "\n".join(report_run(RunDir(tmp_path)))
    assert "events       1 warning or error\n" in text and "checkpoint of step" not in text
    assert "orchestrator: a rollout of 's' failed: KeyError (10 times) (env.py:3)" in text


def test_trust_stands_in_the_report(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    metrics = MetricsFile(tmp_path / "metrics.jsonl", "orchestrator")
    metrics.log(1, {"loss/total": 0.1})
    metrics.log(1, {"node": "a", "node/state": "away", "node/version": 1, "node/in_flight": 0, "node/trust": 0.97})
    text = "\n".join(report_run(RunDir(tmp_path)))
    assert "trust" in text and "0.97" in text


def test_a_steps_parts_add_up(tmp_path):
    # One step that waited long: medians of the parts would hide it, means a step sum up to the step.
    (tmp_path / "config.json").write_text("{}")
    metrics = MetricsFile(tmp_path / "metrics.jsonl", "trainer")
    for step, wait in ((1, 1.0), (2, 1.0), (3, 22.0)):
        parts = {"time/wait_s": wait, "time/forward_backward_s": 4.0, "time/step_s": wait + 5.0}
        metrics.log(step, {"loss/total": 0.1, **parts})
    text = "\n".join(report_run(RunDir(tmp_path)))
    parts = "waiting for a batch 8.00 s (62%), forward and backward 4.00 s (31%), the rest 1.00 s (8%)"
    assert f"a step       13.00 s on average: {parts}" in text


def test_hints_are_listed_by_kind_writer_and_reason():
    # Sums over all steps; the divergence is that of the steps that distilled something.
    hinted = {"hints/found": 5.0, "hints/hinted": 2.0, "hints/kind/bad_json": 5.0, "hints/skipped/max_turns": 3.0}
    steps = [
        trainer_line(1, **hinted, **{"loss/sdpo": 0.4, "sdpo/turns": 2.0, "sdpo/jsd": 0.4}),
        trainer_line(2, **hinted, **{"loss/sdpo": 0.2, "sdpo/turns": 2.0, "sdpo/jsd": 0.2}),
        trainer_line(3, **{"loss/sdpo": 0.0, "sdpo/turns": 0.0}),
    ]
    text = "\n".join(hint_lines(steps))
    assert "4 of 10 error turns got a hint (40%); 4 distilled, in 2 of 3 steps" in text
    assert "kinds: bad_json 10" in text and "left out: max_turns 6" in text
    assert "jsd: first 1 0.4000, last 1 0.2000" in text
    assert hint_lines([trainer_line(1, **{"sdpo/turns": 0.0})]) == []


def test_pairs_are_listed_beside_the_replay():
    # Counts of the file are totals so far, so the last line has them; the replay's lines are the orchestrator's.
    trained = [
        trainer_line(step, **{"loss/replay_dpo": 0.7, "dpo/pairs": 8.0, "dpo/accuracy": 0.5 * step,
                              "pairs/in_file": 9.0 + step, "pairs/refused": 1.0, "pairs/refused/truncated": 1.0})
        for step in (1, 2)
    ]  # fmt: skip
    replay = {"replay/states": 6.0, "replay/pairs": 11.0, "replay/calls": 18.0, "replay/cached": 2.0}
    lines = [*trained, {"step": 2, "role": "orchestrator", **replay, "replay/stopped": 1.0}]
    text = "\n".join(pair_lines(trained, lines))
    assert "16 trained; 11 in the file, 1 of them refused" in text and "refused: truncated 1" in text
    assert "accuracy: first 1 0.500, last 1 1.000" in text
    assert "11 pairs of 6 states; 18 calls; stopped early" in text
    assert pair_lines([trainer_line(1)], [trainer_line(1)]) == []


def test_rounds_are_counted_once(tmp_path):
    # Steps between two rounds repeat the last round's figures.
    lines = [
        trainer_line(1),
        round_line(2, 1, "ab", 100),
        round_line(3, 1, "ab", 150),
        round_line(4, 2, "a", 200),
        {"step": 4, "role": "launcher", "event": "resume"},
        round_line(5, 3, "ab", 250_000, **{"diloco/missed_rounds": 1}),
    ]
    text = "\n".join(joined(lines))
    assert "outer step 3; 3 rounds taken, 1 missed" in text and "a 3, b 2; 1 with one peer alone" in text
    assert "0.2 MB sent" in text and "1.5 s for rounds to end" in text
    assert joined([trainer_line(1)]) == []


def test_the_model_that_a_joint_run_ended_with_is_named(tmp_path):
    # For comparison across machines: outer step and hash, from the line that the trainer writes at its end. A run that
    # continued since then has no such line.
    end = {"step": 8, "role": "trainer", "diloco/final_outer_step": 4, "diloco/final_hash": "0badcafe"}
    text = "joint model: outer step 4, hash 0badcafe, equal on every peer that ended at this outer step"

    def said(*more):
        return joined([round_line(8, 4, "ab", 100), *more])[-1].strip()

    assert said(end) == text
    assert said({**end, "diloco/final_left_behind": 4}) == f"{text}; a delta of outer step 4 was left behind"
    resumed = {"step": 8, "role": "launcher", "event": "resume"}
    assert said(end, resumed) == text
    assert "joint model" not in said(end, resumed, round_line(9, 4, "ab", 100))
    assert said(end, resumed, round_line(9, 4, "ab", 100), {**end, "step": 9}) == text
    assert "joint model" not in said(end, {**resumed, "step": 6})


def test_lost_calls_are_listed_with_their_cost(tmp_path):
    # A lost reply counts with the whole reservation of its call; the report explains this beside the sum.
    ledger = tmp_path / "costs.jsonl"
    for call, status, usd in (("a", "ok", 0.5), ("b", "lost", 2.0)):
        write_cost(ledger, "reserved", call=call, trace="t", teacher="x", usd=2.0, bound=1.0)
        write_cost(ledger, "settled", call=call, trace="t", teacher="x", usd=usd, status=status)
    write_cost(ledger, "reserved", call="c", trace="t", teacher="x", usd=2.0, bound=1.0)
    (tmp_path / "config.json").write_text("{}")
    MetricsFile(tmp_path / "metrics.jsonl", "trainer").log(1, {"loss/total": 0.1, "time/step_s": 1.0})
    (row,) = [line for line in report_run(RunDir(tmp_path)) if "teachers" in line]
    assert "$4.5000 in 3 calls (x $4.5000), 1 failed, 1 without an end" in row
    assert "counts as its reservation" in row


def test_tasks_that_are_never_trained_on_stand_apart(tmp_path):
    # A source of weight 0 has lines of its own, and does not count among the held-out tasks.
    sources = [{"name": "near", "weight": 1.0}, {"name": "far", "weight": 0.0}]
    (tmp_path / "config.json").write_text(json.dumps({"orchestrator": {"source": sources}}))
    MetricsFile(tmp_path / "metrics.jsonl", "trainer").log(1, {"loss/total": 0.1})
    rewards = {"near": (1.0, 0.0, 1.0), "far": (0.0, 0.0)}
    lines = [
        json.dumps({"source": source, "task_id": f"t{task}", "reward": reward}) + "\n"
        for source, values in rewards.items()
        for task, reward in enumerate(values)
    ]
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "eval_000001.jsonl").write_text("".join(lines))
    text = "\n".join(report_run(RunDir(tmp_path)))
    near, far = (text.partition(f"held-out tasks of {name}")[2].partition("evaluation")[0] for name in ("near", "far"))
    assert "3 tasks" in near and "0.667" in near and "never" not in near
    assert "never trained on" in far and "2 tasks" in far and "0.000" in far
