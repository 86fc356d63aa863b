"""python -m benchmarks.rl_throughput_sides.trl_side PLAN OUT [--threads N]: one rank of TRL's GRPOTrainer on a plan.

Under RANK and WORLD_SIZE (torchrun's environment) the ranks share each step's rollouts; without them there is one rank.
Rank 0 writes OUT/result.json and OUT/step_N for each evaluated step. The times exclude saving weights.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from benchmarks.rl_throughput_sides.plan import BETAS, EPS, MAX_GRAD_NORM, Plan, training_order
from benchmarks.rl_throughput_sides.scoring import answer_is_right, call_is_right, first_call
from benchmarks.rl_throughput_sides.trl_tools import environment_class, template_for_trl
from orchestrator.chat_renderer import build_renderer
from orchestrator.environments.toolsmith.taskset import Episode


class Clock(TrainerCallback):
    """Wall-clock seconds of every step, without the time that saving weights took."""

    def __init__(self, plan: Plan, out: Path, first: bool) -> None:
        self._plan, self._out, self._first = plan, out, first
        self.began = 0.0
        self._saving_s = 0.0
        self.seconds: list[float] = []
        """[step] since training began."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        now = time.time()
        self.seconds.append(now - self.began - self._saving_s)
        if state.global_step in self._plan.points and self._first:
            getattr(model, "module", model).save_pretrained(self._out / f"step_{state.global_step}")
        self._saving_s += time.time() - now


def settings(plan: Plan, out: Path, world: int, rows: int) -> GRPOConfig:
    """GRPOTrainer's settings: `rows` rollouts a forward pass on each of `world` ranks."""
    return GRPOConfig(
        output_dir=str(out),
        max_steps=plan.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=plan.rollouts // world // rows,
        num_generations=plan.group_size,
        max_completion_length=plan.max_completion,
        generation_kwargs={"max_new_tokens": plan.max_tokens},
        max_tool_calling_iterations=plan.max_turns - 1,
        shuffle_dataset=False,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        learning_rate=plan.lr,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=plan.seed,
        ddp_find_unused_parameters=False,
    )


def tokenizer_for(plan: Plan) -> PreTrainedTokenizerBase:
    """The model's tokenizer, made fit for TRL's tool loop."""
    tokenizer = AutoTokenizer.from_pretrained(plan.model, padding_side="left")
    tokenizer.chat_template = template_for_trl(tokenizer.chat_template)
    tokenizer.response_template = qwen3_template
    return tokenizer


def single_turn(plan: Plan, episodes: list[Episode], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Rendered prompts as plain text: no tool loop, and no template to render in the timed part."""
    rows = [{"prompt": rendered(episode, tokenizer), "index": index} for index, episode in enumerate(episodes)]

    def reward(completions: list[str], index: list[int], **_: Any) -> list[float]:
        return [call_is_right(episodes[i], first_call(text)) for text, i in zip(completions, index, strict=True)]

    return {"train_dataset": Dataset.from_list(rows), "reward_funcs": reward}


def multi_turn(plan: Plan, episodes: list[Episode]) -> dict[str, Any]:
    """An environment for each task, which the dataset names."""
    rows = [
        {"prompt": question(episode), "environment": str(index), "index": index}
        for index, episode in enumerate(episodes)
    ]

    def reward(completions: list[list[dict[str, Any]]], index: list[int], **_: Any) -> list[float]:
        last = [messages[-1] for messages in completions]
        texts = [message["content"] if message["role"] == "assistant" else "" for message in last]
        return [answer_is_right(episodes[i], text) for text, i in zip(texts, index, strict=True)]

    environments = {str(index): environment_class(episode) for index, episode in enumerate(episodes)}
    return {"train_dataset": Dataset.from_list(rows), "reward_funcs": reward, "environment_factory": environments}


def question(episode: Episode) -> list[dict[str, str]]:
    return [{"role": "user", "content": episode.question}]


def rendered(episode: Episode, tokenizer: PreTrainedTokenizerBase, *, tokenize: bool = False) -> Any:
    """The prompt of an episode as TRL renders it for an environment: text, or ids."""
    instance = environment_class(episode)()
    tools = [getattr(instance, f"tool_{index}") for index in range(len(episode.tools))]
    return tokenizer.apply_chat_template(
        question(episode), tools=tools, add_generation_prompt=True, tokenize=tokenize, return_dict=False
    )


def check_prompts(plan: Plan, episodes: list[Episode], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises SystemExit where a prompt has other token ids than on our side."""
    _, renderer = build_renderer(str(plan.model), None)
    for episode in episodes[:8]:
        tools = [tool.schema() for tool in episode.tools]
        ours = renderer.render_ids(question(episode), tools=tools, add_generation_prompt=True)
        if ours != rendered(episode, tokenizer, tokenize=True):
            raise SystemExit(f"the two sides render the prompt of episode {episode.seed} with different token ids")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=16, help="rollouts of one forward and backward pass")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    plan = Plan.read(options.plan)
    tokenizer, episodes = tokenizer_for(plan), training_order(plan)
    check_prompts(plan, episodes, tokenizer)
    work = single_turn(plan, episodes, tokenizer) if plan.case == "single-turn" else multi_turn(plan, episodes)
    clock = Clock(plan, options.out, rank == 0)
    args = settings(plan, options.out, world, min(options.rows, plan.rollouts // world))
    trainer = GRPOTrainer(model=str(plan.model), args=args, processing_class=tokenizer, callbacks=[clock], **work)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if rank == 0:
        result = {"began": clock.began, "seconds": clock.seconds}
        (options.out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
