"""python -m infra.tiny_models.make: train the tiny policy and the three tiny teachers, and write them to the assets.

1. A tokenizer from toolsmith's own words.
2. One expert. It sees mistakes and their repair, and imitates only the right turns.
3. The policy: the expert with bad habits. It can do everything and often does not.
4. Three teachers: the expert with milder habits, different for each, from other demonstrations.
5. The measured figures of all four as JSON, for README.md.

Everything follows from --seed; the same machine and thread count give the same weights.
"""

import argparse
import json
import random
import shutil
import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from renderers.configs import Qwen3RendererConfig
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from infra.tiny_models.demonstrate import Demonstration, demonstrate
from infra.tiny_models.mixtures import BASE, POLICY, TEACHERS, Mixture
from infra.tiny_models.play import measure
from infra.tiny_models.tokenizer import build_tokenizer
from infra.tiny_models.train import DrawDemonstration, Schedule, new_model, train
from orchestrator.chat_renderer import ToolQwen3Renderer
from orchestrator.environments.toolsmith.taskset import MAX_DIFFICULTY, MIN_DIFFICULTY, generate

ASSETS = Path(__file__).parents[2] / "composer_prime/assets/tiny"
EXPERT = Schedule(steps=2000, learning_rate=5e-3, prompt_weight=0.1)
HABIT = Schedule(steps=250, learning_rate=1e-3)
RENDERER = {
    "name": "custom",
    "import_path": "orchestrator.chat_renderer.ToolQwen3Renderer",
    "thinking_retention": "all",
}
"""The renderer configuration of a tiny model, as verifiers' TrainClientConfig takes it."""


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    tokenizer = build_tokenizer()
    settings = Qwen3RendererConfig(thinking_retention="all")
    renderer = ToolQwen3Renderer(tokenizer, settings)  # pyright: ignore[reportArgumentType]  stubs lack special tokens
    expert = new_model(tokenizer, options.seed)
    train(expert, _drawing(renderer, BASE), EXPERT, seed=options.seed, label="expert")
    for index, (name, mixture) in enumerate({"policy": POLICY, **TEACHERS}.items(), start=1):
        model = deepcopy(expert)
        train(model, _drawing(renderer, mixture), HABIT, seed=options.seed + index, label=name)
        model = save(model, tokenizer, options.out / name)
        figures = {
            split: measure(model.float(), renderer, groups=options.groups, split=split) for split in ("train", "eval")
        }
        print(name, json.dumps(figures), flush=True)


def _drawing(renderer: ToolQwen3Renderer, mixture: Mixture) -> DrawDemonstration:
    def draw(rng: random.Random) -> Demonstration:
        difficulty = rng.randint(MIN_DIFFICULTY, MAX_DIFFICULTY)
        episode = generate(seed=rng.getrandbits(53), difficulty=difficulty, split="train")
        return demonstrate(episode, mixture, renderer, rng.getrandbits(53))

    return draw


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m infra.tiny_models.make", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder that gets policy/ and teacher_*/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", type=int, default=24, help="groups of eight rollouts to measure for each split")
    return parser.parse_args()


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Qwen3ForCausalLM:
    """Write a Hugging Face folder in bfloat16, complete or not at all, and return the model as written."""
    model = model.bfloat16()
    model.set_attn_implementation("sdpa")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as workspace:
        fresh = Path(workspace) / "new"
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        (fresh / "renderer.json").write_text(json.dumps(RENDERER, indent=2) + "\n")
        if folder.exists():
            folder.rename(Path(workspace) / "old")
        for file in fresh.iterdir():
            file.chmod(0o644)
        shutil.move(fresh, folder)
    return model


if __name__ == "__main__":
    main()
