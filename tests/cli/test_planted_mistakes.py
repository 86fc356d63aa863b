"""Mistakes of new users: each is named before a process of the run starts, with its setting or file and line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from composer_prime.config.load import resolve
from composer_prime.errors import ConfigError
from composer_prime.model_source import resolve_model
from composer_prime.plan.plan import build_plan

ROOT = Path(__file__).parents[2]
A1 = str(ROOT / "configs/a1.toml")


def said(tmp_path: Path, *words: str) -> str:
    """Return everything that the start would say about a configuration: the refusal, or problems and notes."""
    folder = [] if "--run.output_dir" in words else ["--run.output_dir", str(tmp_path / "outputs")]
    try:
        plan = build_plan(resolve(["@", A1, *folder, *words]))
    except ConfigError as error:
        return str(error)
    return "\n".join([*plan.problems, *plan.notes])


# What the command line, the file and this machine are enough to see.
@pytest.mark.parametrize(
    ("words", "setting", "remedy"),
    [
        (["--run.name", "a/b"], "run.name = 'a/b'", "letters, digits"),
        (
            ["--orchestrator.weights.sources", '["s3://b/w"]'],
            "orchestrator.weights.sources.0 = 's3://b/w'",
            "https?://",
        ),
        (["--run.max_stepz", "3"], "run.max_stepz", "max_steps"),
        (["--trainer.optim.lr", "fast"], "trainer.optim.lr", "number"),
        (["--model.path", "no/such/folder"], "model.path is 'no/such/folder'", "Hugging Face"),
        (["--model.path", "Qwen/Qwen3-8B"], "model.path is 'Qwen/Qwen3-8B'", "hf download Qwen/Qwen3-8B"),
        (["--trainer.micro_batch_tokens", "128"], "trainer.micro_batch_tokens is 128", "micro_batch_tokens >= 384"),
        (["--model.max_context", "2048"], "model.max_context is 2048", "set model.max_context <= 1024"),
        (["--orchestrator.sampling.max_tokens", "400"], "orchestrator.sampling.max_tokens is 400", "lower max_tokens"),
        (["--orchestrator.source.0.taskset.id", "my_tasks"], "names no module (looked for my_tasks)", "my_tasks.py"),
        (["--orchestrator.source.0.taskset.id", "examples.none"], "looked for examples.none", "a checkout only"),
        (["--orchestrator.source.0.hang_timeout_s", "1"], "source.0.hang_timeout_s = '1'", "or equal to 10"),
        (["--orchestrator.group_size", "1"], "orchestrator.group_size = '1'", "advantages"),
        (["--orchestrator.eval.every_steps", "0"], "orchestrator.eval.every_steps is 0", "nothing is evaluated"),
        (["--trainer.schedule.warmup_steps", "60"], "trainer.schedule.warmup_steps is 60", "warmup_steps 0"),
        (["--resume"], "--resume: there is no run in", "without --resume"),
        (["--channels.sdpo.weight", "0.5"], "channels.sdpo.weight is 0.5", "[orchestrator.hints]"),
        (["--model.chat_template", "none.jinja"], "model.chat_template is none.jinja", "no such file"),
    ],
)
def test_setting_is_named(words, setting, remedy, tmp_path):
    text = said(tmp_path, *words)
    assert setting in text and remedy in text


# A folder that cannot hold a run.
def test_place_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    text = said(tmp_path, "--run.output_dir", str(file))
    assert f"run.output_dir is {file}" in text and "set run.output_dir" in text


# A weight file that a copy cut short.
def test_torn_weights_are_named(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{weights} has" in said(tmp_path, "--model.path", str(folder))


# A chat template that cannot be parsed, one beside a renderer that does not read it, and quantized weights.
@pytest.mark.parametrize(
    ("template", "config", "words", "expected"),
    [
        ("{% for m in messages %}{% endfr %}", {}, (), ["chat template", "endfr", "line 1"]),
        (
            "{% generation %}x{% endgeneration %}",
            {},
            ("--model.renderer", "qwen3"),
            ["model.renderer is 'qwen3'", "leave"],
        ),
        ("x", {"quantization_config": {"quant_method": "fp8"}}, (), ["is quantized (fp8)", "copy in bfloat16"]),
    ],
)
def test_model_is_named(template, config, words, expected, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), folder)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    (file := tmp_path / "own.jinja").write_text(template)
    text = said(tmp_path, "--model.path", str(folder), "--model.chat_template", str(file), *words)
    assert all(part in text for part in expected)


# Processors keep one template as JSON, in as many lines as they like: that is no Jinja, and no mistake.
def test_template_of_a_processor_is_taken(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), folder)
    template = {"chat_template": (folder / "chat_template.jinja").read_text()}
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps(template, indent=2))
    assert "chat template" not in said(tmp_path, "--model.path", str(folder))


# Too few files may be open: the connections of the rollouts would fail one by one. A limit that nobody raises counts.
def test_open_files_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 1 << 20))
    text = said(tmp_path)
    assert "may open 64 files" in text and "ulimit -n" in text


# A user without a home folder, as in some containers, is told what to set.
def test_missing_home_is_named(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(ConfigError, match="set HOME or XDG_CACHE_HOME"):
        resolve_model("smollm2")
