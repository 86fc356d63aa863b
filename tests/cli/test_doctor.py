"""The results of `composer doctor`, and its conclusions."""

from __future__ import annotations

import pytest

from composer_prime.cli.doctor_command import main, shared_memory, torch_check


@pytest.mark.process
def test_doctor_reports_each_part_and_what_to_run_next(capsys, tmp_path):
    # The check loads no torch and names every finding with its level.
    assert main(["--output-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for part in ("python", "memory", "verifiers", "tiny", "disk", "bubblewrap", "torch"):
        assert part in text
    assert text.endswith("next: uv run trainer @ configs/a1.toml\n")


@pytest.mark.process
def test_a_problem_gives_status_1(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert main(["--output-dir", str(file / "outputs")]) == 1
    assert "disk" in capsys.readouterr().out.splitlines()[-1]


def test_doctor_knows_a_torch_that_cannot_use_the_gpus():
    # A machine with a CPU build, or with a driver that is too old, gets the right remedy.
    assert torch_check("2.13.0", "13.0", 1, visible=1).level == "ok"
    remedies = {cuda: torch_check("2.13.0", cuda, 0, visible=2) for cuda in (None, "13.0")}
    assert {check.level for check in remedies.values()} == {"note"}
    assert "CUDA build" in remedies[None].text and "driver" in remedies["13.0"].text


def test_doctor_wants_shared_memory_where_gpus_share_a_machine():
    # Docker's default of 64 MiB stops NCCL between two GPUs, and harms nobody else.
    assert [shared_memory(64 << 20, gpus).level for gpus in (0, 1, 2)] == ["ok", "ok", "note"]
