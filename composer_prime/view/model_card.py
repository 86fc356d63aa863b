"""The model card: README.md in final/, in the form that the Hugging Face Hub reads."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from composer_prime.console import pluralize
from composer_prime.monitor.rollouts import eval_scores
from composer_prime.run.run_dir import RunDir, write_atomic
from composer_prime.view.catalog import read_settings
from composer_prime.view.metrics_reader import RunMetrics
from composer_prime.view.run_payload import trained_tokens
from composer_prime.view.verdict import verdict

_LOAD = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
messages = [{{"role": "user", "content": "Hello"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```"""


def write_model_card(run_dir: RunDir) -> Path | None:
    """Write final/README.md and return it; None without final/. Raises OSError."""
    if not run_dir.final.is_dir():
        return None
    path = run_dir.final / "README.md"
    write_atomic(path, model_card(run_dir).encode())
    return path


def model_card(run_dir: RunDir) -> str:
    """Return the card of a run: base, data, objective, held-out verdict, how to load."""
    settings = read_settings(run_dir)
    metrics = RunMetrics(run_dir.metrics)
    metrics.refresh()
    trained = metrics.trained()
    rewards = [line["reward/mean"] for line in trained.values() if isinstance(line.get("reward/mean"), int | float)]
    base = str(_at(settings, "model", "path") or "unknown")
    sections = {
        "Base": f"`{_last_part(base)}`",
        "Training": _training(settings, trained),
        "Objective": _objective(settings),
        "Held-out results": f"{verdict(eval_scores(run_dir), rewards)['text']}.",
        "How to load": _LOAD.format(folder=run_dir.final.name),
    }
    name = run_dir.root.resolve().name
    head = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- reinforcement-learning"]
    head += [
        "- composer-prime",
        *([f"base_model: {base}"] if base.count("/") == 1 and base[0] not in "./~" else []),
        "---",
    ]
    body = [part for title, text in sections.items() for part in (f"## {title}", "", text, "")]
    return "\n".join([*head, "", f"# {name}", "", *body]).rstrip() + "\n"


def _training(settings: dict[str, Any], trained: dict[int, dict[str, Any]]) -> str:
    tokens = trained_tokens(trained.values())
    seed = _at(settings, "run", "seed")
    parts = [pluralize(max(trained, default=0), "optimizer step")]
    parts += [f"{tokens:,} trained tokens"] if tokens else []
    parts += [f"seed {seed}"] if seed is not None else []
    lora = _at(settings, "trainer", "lora")
    parts += [f"LoRA of rank {lora.get('rank')}"] if isinstance(lora, dict) else []
    sources = _at(settings, "orchestrator", "source") or []
    names = [f"`{_last_part(str(_at(each, 'taskset', 'id')))}`" for each in sources if isinstance(each, dict)]
    data = f" on {', '.join(names)}" if names else ""
    return f"{', '.join(parts)}{data}, with composer-prime {version('composer-prime')}."


def _objective(settings: dict[str, Any]) -> str:
    channels = settings.get("channels")
    channels = channels if isinstance(channels, dict) else {}
    objective = _at(channels, "policy", "objective") or _at(channels, "policy", "import_path")
    rows = [f"- policy: {json.dumps(objective) if isinstance(objective, dict) else objective}"]
    for name, title in {"sdpo": "SDPO", "replay_dpo": "replay-DPO"}.items():
        weight = _at(channels, name, "weight")
        if isinstance(weight, int | float) and weight:
            rows.append(f"- {title}: weight {weight:g}")
    return "\n".join(rows)


def _last_part(value: str) -> str:
    """Return only the last part of an absolute path: a card is published, and folders name people."""
    return Path(value).name if value.startswith(("/", "~")) else value


def _at(settings: dict[str, Any], *names: str) -> Any:
    value: Any = settings
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value
