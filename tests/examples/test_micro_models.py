"""Claims about the tiny coder: it loads, its demonstrations fit, and it plays."""

import asyncio
import json
import random

import pytest
from renderers.configs import Qwen3RendererConfig
from transformers import AutoTokenizer, Qwen3ForCausalLM

from composer_prime.config.load import resolve
from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.model_source import resolve_model
from examples.micro_code.episode import SOURCE, start_files
from examples.micro_code.execution import CodeRunner, Job
from examples.micro_code.grammar import draw_function
from infra.tiny_code.demonstrate import demonstrate, trusted_result
from infra.tiny_code.mixtures import BASE, POLICY, TEACHERS
from infra.tiny_code.play import draw_functions, play
from infra.tiny_code.vocabulary import build_tokenizer
from orchestrator.chat_renderer import ToolQwen3Renderer

FOLDER = resolve_model("tiny_code")
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
RENDERER = ToolQwen3Renderer(TOKENIZER, Qwen3RendererConfig(thinking_retention="all"))


def test_the_model_is_small_and_qwen3():
    model = Qwen3ForCausalLM.from_pretrained(FOLDER)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1.5e6
    assert len(TOKENIZER) <= model.config.vocab_size
    assert sum(file.stat().st_size for file in FOLDER.parent.rglob("*") if file.is_file()) < 6e6


def test_the_tokenizer_is_what_its_script_makes():
    assert build_tokenizer().get_vocab() == TOKENIZER.get_vocab()


def test_demonstrations_fit_into_the_context():
    # Every mixture, all difficulties; the prompts are those of rollouts, so these fit as well.
    limit = resolve(["@", "configs/code/a1.toml"]).model.max_context
    rng = random.Random(0)
    for mixture in (BASE, POLICY, *TEACHERS.values()):
        for difficulty in (1, 2, 3):
            for _ in range(8):
                function = draw_function(seed=rng.getrandbits(40), difficulty=difficulty, split="train")
                made = demonstrate(function, mixture, RENDERER, rng.getrandbits(40))
                assert len(made.token_ids) == len(made.trained) <= limit and any(made.trained)


def test_provenance_names_command_and_figures():
    provenance = json.loads((FOLDER.parent / "provenance.json").read_text())
    assert provenance["command"].startswith("python -m infra.tiny_code.make --teachers FOLDER --seed")
    assert 0.15 < provenance["figures"]["eval"]["solved"] < 0.5


@pytest.mark.process  # a box
def test_demonstrations_say_what_a_box_would_say():
    # The script executes its own code without a box; the texts are those that rollouts see.
    functions = [draw_function(seed=seed, difficulty=1 + seed % 3, split="train") for seed in range(12)]
    trees = []
    for function in functions:
        files = start_files(function, lure=False)
        lines = [*function.start]
        lines[function.defect_line - 1] = lines[function.defect_line - 1].strip()
        trees += [files, {**files, SOURCE: "\n".join(function.lines)}, {**files, SOURCE: "\n".join(lines)}]

    async def boxed() -> list[dict]:
        runner = CodeRunner(RuntimeConfig(type="subprocess"))
        try:
            return await asyncio.gather(*(runner.run(Job(files=files)) for files in trees))
        finally:
            await runner.close()

    assert asyncio.run(asyncio.wait_for(boxed(), 200)) == [trusted_result(files) for files in trees]


@pytest.mark.process  # a box
def test_the_shipped_model_plays():
    # It reads, edits and ends; some episodes are solved, and some meet errors that hints can repair.
    model = Qwen3ForCausalLM.from_pretrained(FOLDER).float().eval()

    async def some() -> list:
        runner = CodeRunner(RuntimeConfig(type="subprocess"))
        try:
            return await play(model, RENDERER, draw_functions(24, seed=3, split="eval"), runner, seed=3)
        finally:
            await runner.close()

    episodes = asyncio.run(asyncio.wait_for(some(), 250))
    names = [action.name for episode in episodes for action in episode.actions]
    assert names.count("read") >= 20 and names.count("edit") >= 12
    assert any(episode.errors for episode in episodes)
    assert any(episode.files[SOURCE] == "\n".join(episode.function.lines) + "\n" for episode in episodes)
