"""The results of `composer doctor`, and its conclusions."""

import pytest

from composer_prime.cli.doctor_command import main


@pytest.mark.process
def test_doctor_reports_each_part_and_what_to_run_next(capsys, tmp_path):
    # The check loads no torch and names every finding with its level.
    assert main(["--output-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for part in ("python", "memory", "verifiers", "tiny", "disk", "bubblewrap", "torch"):
        assert part in text
    assert text.endswith("next: uv run trainer @ a1\n")


@pytest.mark.process
def test_a_problem_gives_status_1(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert main(["--output-dir", str(file / "outputs")]) == 1
    assert "disk" in capsys.readouterr().out.splitlines()[-1]
