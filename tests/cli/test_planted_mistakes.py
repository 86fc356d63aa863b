"""Mistakes of new users: each is named before a process of the run starts, with its setting or file and line."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from composer_prime.config.load import resolve
from composer_prime.errors import ConfigError
from composer_prime.model_source import resolve_model
from composer_prime.plan.plan import build_plan
from composer_prime.plan.source_check import check_sources

ROOT = Path(__file__).parents[2]
A1 = str(ROOT / "configs/a1.toml")


def said(tmp_path: Path, *words: str) -> str:
    """Return everything that the start would say about a configuration: the refusal, or problems and notes."""
    folder = [] if "--run.output_dir" in words else ["--run.output_dir", str(tmp_path / "outputs")]
    try:
        plan = build_plan(resolve(["@", A1, *folder, *words]).config)
    except ConfigError as error:
        return str(error)
    return "\n".join([*plan.problems, *plan.notes])


# What the command line, the file and this machine are enough to see.
@pytest.mark.parametrize(
    ("words", "setting", "remedy"),
    [
        (["--run.max_stepz", "3"], "run.max_stepz", "max_steps"),
        (["--trainer.optim.lr", "fast"], "trainer.optim.lr", "number"),
        (["--model.path", "no/such/folder"], "model.path is 'no/such/folder'", "Hugging Face"),
        (["--model.path", "Qwen/Qwen3-8B"], "model.path is 'Qwen/Qwen3-8B'", "hf download Qwen/Qwen3-8B"),
        (["--trainer.micro_batch_tokens", "128"], "trainer.micro_batch_tokens is 128", "micro_batch_tokens >= 384"),
        (["--model.max_context", "2048"], "model.max_context is 2048", "set model.max_context <= 1024"),
        (["--orchestrator.sampling.max_tokens", "400"], "orchestrator.sampling.max_tokens is 400", "lower max_tokens"),
        (["--orchestrator.source.0.taskset.id", "my_tasks"], "names no module (looked for my_tasks)", "my_tasks.py"),
        (["--orchestrator.eval.every_steps", "0"], "orchestrator.eval.every_steps is 0", "nothing is evaluated"),
        (["--resume"], "--resume: there is no run in", "without --resume"),
        (["--trainer.schedule.warmup_steps", "60"], "trainer.schedule.warmup_steps is 60", "warmup_steps 0"),
        (["--channels.sdpo.weight", "0.5"], "channels.sdpo.weight is 0.5", "[orchestrator.hints]"),
        (["--model.chat_template", "none.jinja"], "model.chat_template is none.jinja", "no such file"),
    ],
)
def test_setting_is_named(words, setting, remedy, tmp_path):
    text = said(tmp_path, *words)
    assert setting in text and remedy in text


# A folder that cannot hold a run, and a port that another process holds.
def test_place_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    text = said(tmp_path, "--run.output_dir", str(file))
    assert f"run.output_dir is {file}" in text and "set run.output_dir" in text
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        assert "orchestrator.step_address" in said(tmp_path, "--orchestrator.step_address", address)


# A weight file that a copy cut short.
def test_torn_weights_are_named(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{weights} has" in said(tmp_path, "--model.path", str(folder))


MODULE = """
import verifiers.v1 as vf

__all__ = ["MineTaskset"]
{top}

class MineData(vf.TaskData):
    pass


class MineTask(vf.Task[MineData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return 1.0


class MineTaskset(vf.Taskset[MineTask, vf.TasksetConfig]):
    def load(self):
        {load}
"""
GOOD = "yield MineTask(MineData(prompt='Hi.'), self.config.task)"
MODULES = {
    "raises_in_load": {"top": "", "load": "raise LookupError('no word list')"},
    "raises_late": {"top": "", "load": f"{GOOD}; raise LookupError('no second task')"},
    "raises_at_import": {"top": "WORDS = {}['words']", "load": GOOD},
    "has_no_task": {"top": "", "load": "yield from ()"},
    "takes_no_split": {"top": "", "load": GOOD},
}


# What only the plugins know, all in one dry run: file and line of what raises, the setting that is misspelt, the task
# set without tasks, the chat template that is missing.
@pytest.mark.slow
def test_plugins_are_named(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), model)
    (model / "chat_template.jinja").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "renderer.json").unlink(missing_ok=True)
    sources = []
    for name, parts in MODULES.items():
        (tmp_path / f"{name}.py").write_text(MODULE.format(**parts))
        sources.append({"name": name, "taskset": {"id": name}})
    sources[-1]["taskset"]["splt"] = "train"
    (tmp_path / "run.json").write_text(json.dumps({"orchestrator": {"source": sources}}))
    words = ["@", A1, "@", str(tmp_path / "run.json"), "--orchestrator.eval.every_steps", "0"]
    config = resolve([*words, "--model.path", str(model), "--run.output_dir", str(tmp_path / "outputs")]).config
    plan = build_plan(config, starter=None)
    check_sources(config, plan, "orchestrator.check_sources")
    text = "\n".join(plan.problems)
    assert "LookupError: no word list" in text and "raises_in_load.py:19, in load" in text
    assert "LookupError: no second task" in text and "raises_late.py:19, in load" in text
    assert "KeyError: 'words'" in text and "raises_at_import.py:5" in text
    assert "'has_no_task': its task set 'train'" in text and "has no task" in text
    assert "splt" in text
    assert "chat template" in text
