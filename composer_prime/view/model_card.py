"""The model card: README.md in final/, in the form that the Hugging Face Hub reads."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from composer_prime.console import pluralize
from composer_prime.monitor.metrics_file import read_history
from composer_prime.monitor.progress import RunProgress, numeric_field
from composer_prime.monitor.rollouts import eval_scores
from composer_prime.run.run_dir import RunDir, write_atomic
from composer_prime.view.catalog import flatten, read_settings
from composer_prime.view.run_verdict import verdict

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- reinforcement-learning
- composer-prime
{base_model}---

# {name}

## Base

`{base}`

## Training

{training}

## Objective

{objective}

## Held-out results

{verdict}.

## How to load

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("final")
tokenizer = AutoTokenizer.from_pretrained("final")
messages = [{{"role": "user", "content": "Hello"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```
"""


def write_model_card(run_dir: RunDir) -> Path | None:
    """Write final/README.md and return it; None without final/. Raises OSError."""
    if not run_dir.final.is_dir():
        return None
    path = run_dir.final / "README.md"
    write_atomic(path, model_card(run_dir).encode())
    return path


def model_card(run_dir: RunDir) -> str:
    """Return the card of a run: base, data, objective, held-out verdict, how to load."""
    settings = flatten(read_settings(run_dir))
    progress = RunProgress()
    progress.update(read_history(run_dir.metrics))
    base = str(settings.get("model.path") or "unknown")
    is_on_hub = base.count("/") == 1 and base[0] not in "./~"
    weights = {"SDPO": "channels.sdpo.weight", "replay-DPO": "channels.replay_dpo.weight"}
    terms = [f"- policy: {settings.get('channels.policy.objective') or settings.get('channels.policy.import_path')}"]
    terms += [f"- {name}: weight {settings[key]:g}" for name, key in weights.items() if settings.get(key)]
    return _CARD.format(
        name=run_dir.root.resolve().name,
        base=_last_part(base),
        base_model=f"base_model: {base}\n" if is_on_hub else "",
        training=_training(settings, progress),
        objective="\n".join(terms),
        verdict=verdict(eval_scores(run_dir), progress.rewards())["text"],
    )


def _training(settings: dict[str, Any], progress: RunProgress) -> str:
    tokens = int(sum(numeric_field(line, "tokens/trained") or 0.0 for line in progress.steps.values()))
    rank = settings.get("trainer.lora.rank")
    tasksets = [value for key, value in settings.items() if key.endswith(".taskset.id") and "source" in key]
    parts = [pluralize(max(progress.steps, default=0), "optimizer step"), f"{tokens:,} trained tokens"]
    parts += [f"seed {settings.get('run.seed')}", *([f"LoRA of rank {rank}"] if rank else [])]
    data = ", ".join(f"`{_last_part(str(each))}`" for each in tasksets)
    return f"{', '.join(parts)}{f' on {data}' if data else ''}, with composer-prime {version('composer-prime')}."


def _last_part(value: str) -> str:
    """Return only the last part of an absolute path: a card is published, and folders name people."""
    return Path(value).name if value.startswith(("/", "~")) else value
