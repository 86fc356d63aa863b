"""The results of `composer doctor`, and its conclusions."""

from __future__ import annotations

import pytest

from composer_prime.cli.doctor_command import main, shared_memory, torch_check, what_works


@pytest.mark.process
def test_doctor_reports_each_part_and_says_what_works(capsys, tmp_path):
    # The check loads no torch and names every finding with its level, then what can be done and how.
    assert main(["--output-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for part in ("python", "memory", "verifiers", "tiny", "disk", "loopback", "open files", "torch"):
        assert part in text
    assert "yes  the tiny model, on a CPU" in text and text.endswith("next: uv run trainer @ configs/a1.toml\n")


def test_doctor_names_what_each_use_lacks():
    # A note keeps from one use, not from the others; a problem keeps from all.
    lines = "\n".join(what_works({"tiny": "ok", "smollm2": "note", "GPUs": "ok", "torch": "note"}))
    assert "no   SmolLM2-135M, on a CPU    see smollm2 above" in lines
    assert "no   training on GPUs          see torch above" in lines and "yes  vLLM as the engine" in lines
    (line,) = what_works({"tiny": "bad", "disk": "bad", "GPUs": "note"})
    assert line == "2 problems to fix before anything can run: tiny, disk"


def test_doctor_knows_a_torch_that_cannot_use_the_gpus():
    # A machine with a CPU build, or with a driver that is too old, gets the right remedy.
    gpu = ["NVIDIA H100", 9, 0]
    assert torch_check({"version": "2.13.0", "cuda": "13.0", "gpus": [gpu]}, 1).level == "ok"
    for cuda, said in ((None, "install its CUDA build"), ("13.0", "update the driver")):
        check = torch_check({"version": "2.13.0", "cuda": cuda, "gpus": []}, 2)
        assert check.level == "note" and "can use 0 of 2 visible GPUs" in check.text and said in check.text


def test_doctor_wants_shared_memory_where_gpus_share_a_machine():
    # Docker's default of 64 MiB stops NCCL between two GPUs, and harms nobody else.
    assert [shared_memory(64 << 20, gpus).level for gpus in (0, 1, 2)] == ["ok", "ok", "note"]
