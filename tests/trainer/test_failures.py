"""Failures around a trainer rank end in a clear error, a non-zero status, and nothing half-done."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time

import msgspec
import numpy as np
import psutil
import pytest
from rank_process import start_ranks
from small_runs import make_samples
from step_peer import StepPeer

from composer_prime.monitor.events import read_events
from composer_prime.run.keys import RunKeys
from composer_prime.run.ledger import check_ledger, effective, left_out
from composer_prime.run.run_dir import read_run_id
from composer_prime.run.weights import WeightStore, open_signed
from composer_prime.wire.types import RunFinished, flags, pack_floats
from trainer import train
from trainer.weights.checkpoint import Checkpoints

pytestmark = pytest.mark.process

ANSWERS = {
    "bytes that are no message": (lambda peer, request: b"\x93garbage", "WireError: 8 bytes from the orchestrator"),
    "a failed run": (
        lambda peer, request: msgspec.msgpack.encode(RunFinished(reason="no node is left", failed=True)),
        "RoleFailedError: the orchestrator ended the run after step 0: no node is left",
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_a_wrong_answer_ends_the_rank_and_nothing_is_trained(make_run, case):
    # The rank ends with status 1 and the reason; the store holds version 0 only. test_step_client.py has other answers.
    answer, reason = ANSWERS[case]
    run = make_run()
    with StepPeer(run.dir, make_samples, max_steps=3, answer=answer) as peer:
        codes, outputs = run.train()
    assert codes == [1] and reason in outputs[0], "\n".join(outputs)
    assert [done.step for done in peer.done] == [0] and effective(run.dir.ledger) == {}
    assert WeightStore(run.dir.weights).versions() == [0]


def test_nan_in_a_sample_is_refused_by_name(make_run):
    # A NaN advantage in step 2: status 1, the sample is named, step 1 stays the last trained and published one.
    def samples_of(step):
        samples = make_samples(step)
        if step == 2:
            broken = [float("nan")] * samples[5].num_tokens
            samples[5] = msgspec.structs.replace(samples[5], advantages=pack_floats(broken))
        return samples

    run = make_run()
    with StepPeer(run.dir, samples_of, max_steps=3):
        codes, outputs = run.train()
    assert codes == [1] and "advantages of sample s2-5/0 hold NaN or infinity; nothing was trained" in outputs[0]
    assert list(effective(run.dir.ledger)) == [1] and WeightStore(run.dir.weights).versions() == [0, 1]


def overflowing(step: int):
    """The step's samples; the loss of the sixth overflows to infinity."""
    samples = make_samples(step)
    trained = np.array(flags(samples[5].loss_mask), dtype=np.float32)
    samples[5] = msgspec.structs.replace(
        samples[5], advantages=pack_floats(trained * 3e38), logprobs=pack_floats(trained * -60)
    )
    return samples


def test_a_step_that_is_not_finite_is_skipped_on_both_ranks(make_run):
    # Step 2 of 4 overflows on one of two ranks: both go on to the end, version 2 has the weights of version 1, the
    # ledger counts no sample of the step, log and events name the task, group and rollout.
    run = make_run(run={"max_steps": 4}, trainer={"weights": {"keep": 9}})
    with StepPeer(run.dir, lambda step: (overflowing if step == 2 else make_samples)(step), max_steps=4) as peer:
        codes, outputs = run.train(2)
    assert codes == [0, 0] and [done.step for done in peer.done] == [0, 1, 2, 3, 4], "\n".join(outputs)
    trained = effective(run.dir.ledger)
    assert [len(trained[step]) for step in (1, 2, 3, 4)] == [12, 0, 12, 12] and check_ledger(run.dir.ledger) == []
    assert "s2-5/0" in left_out(run.dir.ledger)
    lines = [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]
    assert [line["optim/skipped"] for line in lines if "optim/skipped" in line] == [0, 1, 0, 0]
    (problem,) = [each.text for each in read_events(run.dir.root / "events.jsonl") if "NaN" in each.text]
    assert "step 2 skipped (1 in a row): NaN or infinity" in problem and "task task, group s2, rollout s2-5" in problem
    assert all(problem in output for output in outputs)
    keys, store = RunKeys(run.dir.keys), WeightStore(run.dir.weights)
    of = [open_signed(store.manifest(v), keys.verifier(), run_id=read_run_id(run.dir)).chunks for v in range(5)]
    assert of[1] == of[2] and of[0] != of[1] and of[2] != of[3] != of[4]


def test_steps_in_a_row_that_are_not_finite_end_the_run(make_run):
    # Four skipped steps are one more than are allowed: both ranks end with the remedy, after a checkpoint
    # from which a resume goes on with the step after them. That of every second step is not written again.
    run = make_run(run={"max_steps": 9}, trainer={"checkpoint": {"every_steps": 2, "keep": 1}})
    samples_of = lambda step: (overflowing if step in (1, 3, 4, 5, 6) else make_samples)(step)
    with StepPeer(run.dir, samples_of, max_steps=9) as peer:
        codes, outputs = run.train(2)
    assert codes == [1, 1] and run.dir.complete_checkpoints() == [6], "\n".join(outputs)
    assert peer.checkpoints == [2, 4, 6]
    reason = r"4 steps in a row, up to step 6, were not finite.*trainer.optim.lr"
    assert all(re.search(reason, output) for output in outputs)
    run.write(run.config.model_copy(update={"run": run.config.run.model_copy(update={"resume": True, "max_steps": 7})}))
    with StepPeer(run.dir, make_samples, max_steps=7) as peer:
        codes, outputs = run.train()
    assert codes == [0] and [request.step for request in peer.requests] == [7], "\n".join(outputs)


def test_no_rank_asks_for_a_batch_before_the_start_is_noted(make_run):
    # A living orchestrator refuses the steps that it takes for trained, and would serve a batch in the layout of the
    # trainer before: both ranks wait until it notes the start, here at the second message.
    run, early = make_run(run={"max_steps": 1}), []

    def answer(peer, request):
        if not peer.done:
            early.append(request)

    with StepPeer(run.dir, make_samples, max_steps=1, answer=answer) as peer:
        peer.lost_first = {0}
        codes, outputs = run.train(2)
    assert codes == [0, 0] and early == [] and [done.step for done in peer.done] == [0, 1], "\n".join(outputs)


def test_one_rank_s_trouble_ends_both_with_its_reason(make_run):
    # Rank 1 gets garbage: rank 1 says what it got, rank 0 says that rank 1 failed and why; neither hangs.
    lie = lambda peer, request: b"\xc1" if request.rank == 1 else None
    run = make_run()
    with StepPeer(run.dir, make_samples, max_steps=3, answer=lie):
        codes, outputs = run.train(2)
    assert codes == [1, 1]
    assert "RoleFailedError: step 1 cannot begin, other ranks failed: rank 1: 1 bytes from the orch" in outputs[0]
    assert "WireError: 1 bytes from the orchestrator" in outputs[1]


FAILS_ALONE = """
import os, time, torch
import torch.distributed as dist

def wait_for_the_others(*_):  # as NCCL does while another rank is in a collective
    time.sleep(600)

dist.destroy_process_group = wait_for_the_others

class Planted(torch.optim.SGD):
    def step(self, closure=None):
        if os.environ["RANK"] == "1":
            raise RuntimeError("planted")
        return super().step(closure)
"""


def test_a_rank_that_fails_alone_says_why_and_ends(make_run, tmp_path):
    # Rank 1 meets an error that is none of ours in the middle of step 1, while rank 0 goes on to a collective: rank 1
    # prints its traceback and leaves without waiting for the group, and rank 0 ends after it.
    (tmp_path / "fails_alone.py").write_text(FAILS_ALONE)
    run = make_run(run={"import_from": [str(tmp_path)]}, trainer={"optim": {"type": "fails_alone:Planted"}})
    with StepPeer(run.dir, make_samples, max_steps=3):
        ranks = run.start(2)
        codes = [ranks[1].wait(60), ranks[0].wait(60)]
    assert codes == [1, 1], ranks[0].output
    assert "Traceback" in ranks[1].output and "RuntimeError: planted" in ranks[1].output
    assert effective(run.dir.ledger) == {} and WeightStore(run.dir.weights).versions() == [0]


def test_an_early_end_still_writes_final_and_a_checkpoint(make_run):
    # RunFinished before max_steps: status 0, the last step is checkpointed, final/ is there.
    run = make_run(run={"max_steps": 9})
    with StepPeer(run.dir, make_samples, max_steps=2):
        codes, outputs = run.train(2)
    assert codes == [0, 0] and "no batch after step 2: all steps are done" in outputs[0], "\n".join(outputs)
    assert run.dir.complete_checkpoints() == [2] and (run.dir.final / "model.safetensors").is_file()


def test_a_failed_checkpoint_does_not_stop_the_run(make_run):
    # The write of checkpoint 1 fails as on a full disk, on both ranks: its folder goes, step 2 trains; the last one
    # failing too is the run's failure, after final/ was written.
    run = make_run(run={"max_steps": 2}, trainer={"checkpoint": {"every_steps": 1}})
    with StepPeer(run.dir, make_samples, max_steps=2) as peer:
        codes, outputs = run.train(2, file_limit_bytes=100_000)
    assert codes == [1, 1], "\n".join(outputs)
    assert "no checkpoint of step 1" in outputs[0] and "File too large" in outputs[0], "\n".join(outputs)
    assert "CheckpointError: checkpoint" in outputs[0]
    assert "free some space or lower trainer.checkpoint.keep" in outputs[0]
    assert [done.step for done in peer.done] == [0, 1, 2] and peer.checkpoints == [1, 2]
    assert list(run.dir.checkpoints.iterdir()) == [] and (run.dir.final / "model.safetensors").is_file()
    assert [json.loads(line)["checkpoint/failed"] for line in run.dir.metrics.read_text().splitlines()] == [False, True]


def slow_to_write(run_dir: str) -> None:
    """A rank whose thread takes a while to write a checkpoint."""
    write = Checkpoints._write

    def slow(*parts):
        time.sleep(0.5)
        write(*parts)

    Checkpoints._write = slow
    sys.exit(train.main(["--run-dir", run_dir]))


def test_a_failure_while_a_checkpoint_is_written_leaves_it(make_run):
    # The run fails right after step 1, whose checkpoint is due: the ranks end with it.
    run = make_run(trainer={"checkpoint": {"every_steps": 1}})
    failed = msgspec.msgpack.encode(RunFinished(reason="no node is left", failed=True))
    answer = lambda peer, request: failed if request.step == 2 else None
    with StepPeer(run.dir, make_samples, max_steps=3, answer=answer):
        ranks = start_ranks([run.dir.root] * 2, work=slow_to_write)
        assert [rank.wait(200) for rank in ranks] == [1, 1], ranks[0].output
    assert "no node is left" in ranks[0].output and run.dir.complete_checkpoints() == [1], ranks[0].output


def test_an_orchestrator_that_cannot_save_is_reported(make_run):
    # CheckpointSaved with an error: the trainer's part is not written either, the reason is passed on.
    run = make_run(run={"max_steps": 1})
    with StepPeer(run.dir, make_samples, max_steps=1) as peer:
        peer.refuse_checkpoint = "no space left on its disk"
        codes, outputs = run.train()
    assert codes == [1] and "the orchestrator's part: no space left on its disk" in outputs[0]
    assert run.dir.complete_checkpoints() == []


def test_damaged_and_missing_checkpoints(make_run):
    # A shard with another byte, a truncated one and a resume without any checkpoint: CheckpointError names the folder
    # and the way on.
    run = make_run(run={"max_steps": 1})
    resumed = run.config.model_copy(update={"run": run.config.run.model_copy(update={"resume": True, "max_steps": 2})})
    run.write(resumed)
    codes, outputs = run.train()
    assert codes == [1] and "--resume found no complete checkpoint below" in outputs[0]
    run.write(run.config)
    with StepPeer(run.dir, make_samples, max_steps=2):
        assert run.train()[0] == [0]
        (shard,) = (run.dir.checkpoint(1) / "trainer").glob("*.distcp")
        whole = shard.read_bytes()
        run.write(resumed)
        for damaged in (whole[:-5000] + bytes([whole[-5000] ^ 1]) + whole[-4999:], whole[:5000]):
            shard.write_bytes(damaged)
            codes, outputs = run.train()
            assert codes == [1] and "step_000001/trainer cannot be loaded" in outputs[0], "\n".join(outputs)
            assert "Remove that folder to resume from the one before it" in outputs[0]


def test_the_death_of_one_rank_ends_the_other(make_run):
    # kill -9 of rank 1 while both wait: rank 0 meets a broken collective and ends with an error; no half step.
    run = make_run()
    with StepPeer(run.dir, make_samples, max_steps=3) as peer:
        peer.quiet_from = 2
        ranks = run.start(2)
        ranks[0].wait_for("step 1:")
        os.kill(ranks[1].pid, signal.SIGKILL)
        peer.release()
        assert ranks[0].wait(200) == 1 and ranks[1].wait(10) == -9
    assert WeightStore(run.dir.weights).versions() == [0, 1] and list(effective(run.dir.ledger)) == [1]


def test_garbage_on_every_listening_socket_is_survived(make_run):
    # Bytes of nonsense to every port that the ranks listen on (torch's rendezvous store, gloo), while they wait for
    # step 2: the run goes on to its end.
    run = make_run()
    with StepPeer(run.dir, make_samples, max_steps=3) as peer:
        peer.quiet_from = 2
        ranks = run.start(2)
        ranks[0].wait_for("step 1:")
        listening = {
            connection.laddr.port
            for rank in ranks
            for connection in psutil.Process(rank.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening
        for port in listening:
            for garbage in (b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
                with socket.create_connection(("127.0.0.1", port), timeout=5) as sender:
                    sender.sendall(garbage)
        time.sleep(0.2)
        peer.release()
        assert [rank.wait(200) for rank in ranks] == [0, 0], ranks[0].output
