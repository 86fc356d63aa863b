"""Shell completion: what bash offers for commands, flags, settings and values."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from composer_prime.cli.completion_command import completion_scripts, main

_ASK = """
source {script}
COMP_WORDS=({words} "{last}"); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_shtab_{program} {program} "{last}" "" 2>/dev/null
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.process
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_settings_and_values(tmp_path, monkeypatch, capsys):
    # Installed for this user, the script offers commands, their flags, the keys of the configuration and their values.
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert main(["bash", "--install"]) == 0
    assert "wrote 5 files to" in capsys.readouterr().out
    for words, last, offered in (
        ("composer", "ex", "export"),
        ("composer export --dtype", "", "float32 float16 bfloat16"),
        ("composer pairs", "", "report"),
        ("trainer", "--trainer.lora.r", "--trainer.lora.rank"),
        ("trainer --inference.engine", "", "local vllm"),
        ("composer plan --run.resume", "", "true false"),
    ):
        program = words.split()[0]
        script = tmp_path / "bash-completion/completions" / program
        text = _ASK.format(script=script, words=words, last=last, program=program)
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=100, check=True)
        assert done.stdout.strip() == offered, (words, done.stderr)


def test_every_program_has_a_script_for_every_shell():
    # zsh and fish get the same settings; each script is bound to its program.
    for shell, binding in (("zsh", "#compdef {}"), ("fish", "complete -c {} ")):
        scripts = completion_scripts(shell)
        assert set(scripts) == {"composer", "trainer", "orchestrator", "inference", "diloco"}
        assert all(binding.format(program) in script for program, script in scripts.items())
        assert "trainer.lora.rank" in scripts["trainer"]
