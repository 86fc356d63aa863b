"""python -m infra.tiny_code.make: train the tiny coder and write it to the assets, with its provenance.

1. A tokenizer of micro_code's own words.
2. One expert. It sees mistakes and their repair, and imitates only the right turns.
3. The policy: the expert with bad habits. It can do everything and often does not.
4. Two teachers: the expert with milder habits, a different one for each. They are not shipped: pairs.py lets them
   vote, and its pairs are.
5. provenance.json: command, versions, mixtures and the measured figures.

Everything follows from --seed; the same machine and thread count give the same weights.
"""

import argparse
import json
import random
import time
from copy import deepcopy
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from renderers.configs import Qwen3RendererConfig

from composer_prime.config.sandbox import RuntimeConfig
from examples.micro_code.grammar import MAX_DIFFICULTY, MIN_DIFFICULTY, draw_function
from infra.tiny_code.demonstrate import CoderMixture, demonstrate
from infra.tiny_code.mixtures import BASE, POLICY, TEACHERS
from infra.tiny_code.play import measure
from infra.tiny_code.vocabulary import build_tokenizer
from infra.tiny_models.demonstrate import Demonstration
from infra.tiny_models.make import save
from infra.tiny_models.train import DrawDemonstration, Schedule, new_model, train
from orchestrator.chat_renderer import ToolQwen3Renderer

ASSETS = Path(__file__).parents[2] / "composer_prime/assets/tiny_code"
EXPERT = Schedule(steps=1400, learning_rate=5e-3, prompt_weight=0.1)
HABIT = Schedule(steps=200, learning_rate=1e-3)
SIZE = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    tokenizer = build_tokenizer()
    settings = Qwen3RendererConfig(thinking_retention="all")
    renderer = ToolQwen3Renderer(tokenizer, settings)  # pyright: ignore[reportArgumentType]  stubs lack special tokens
    started = time.process_time()
    expert = new_model(tokenizer, options.seed, **SIZE)
    train(expert, _drawing(renderer, BASE), EXPERT, seed=options.seed, label="expert")
    figures: dict[str, Any] = {}
    for index, (name, mixture) in enumerate({"policy": POLICY, **TEACHERS}.items(), start=1):
        model = deepcopy(expert)
        train(model, _drawing(renderer, mixture), HABIT, seed=options.seed + index, label=name)
        folder = options.out / name if name == "policy" else options.teachers / name
        model = save(model, tokenizer, folder)
        trained_s = time.process_time() - started
        runtime = RuntimeConfig(type=options.runtime)
        figures[name] = {
            split: measure(model.float(), renderer, runtime, groups=options.groups, split=split)
            for split in ("train", "eval")
        }
        print(name, f"{trained_s:.0f} s of processor time", json.dumps(figures[name]), flush=True)
        if name == "policy":
            _write_provenance(options, mixture, figures[name])


def _write_provenance(options: argparse.Namespace, mixture: CoderMixture, figures: dict[str, Any]) -> None:
    settings = f"--seed {options.seed} --threads {options.threads}"
    provenance = {
        "command": f"python -m infra.tiny_code.make --teachers FOLDER {settings}",
        "data": "synthetic episodes of examples/micro_code, training templates only",
        "license": "that of this repository",
        "torch": version("torch"),
        "transformers": version("transformers"),
        "expert": asdict(EXPERT) | asdict(BASE),
        "policy": asdict(HABIT) | asdict(mixture),
        "figures": figures,
    }
    (options.out / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")


def _drawing(renderer: ToolQwen3Renderer, mixture: CoderMixture) -> DrawDemonstration:
    def draw(rng: random.Random) -> Demonstration:
        difficulty = rng.randint(MIN_DIFFICULTY, MAX_DIFFICULTY)
        function = draw_function(seed=rng.getrandbits(53), difficulty=difficulty, split="train")
        return demonstrate(function, mixture, renderer, rng.getrandbits(53))

    return draw


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m infra.tiny_code.make", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder that gets policy/ and provenance.json")
    parser.add_argument("--teachers", type=Path, required=True, help="folder that gets the teachers, which do not ship")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", type=int, default=24, help="groups of eight episodes to measure for each split")
    parser.add_argument("--runtime", choices=("bubblewrap", "subprocess"), default="bubblewrap")
    return parser.parse_args()


if __name__ == "__main__":
    main()
