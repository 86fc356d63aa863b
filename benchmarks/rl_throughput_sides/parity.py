"""python -m benchmarks.rl_throughput_sides.parity PLAN: compare the token ids of both sides. Prints JSON.

It compares for a sample of tasks: the prompt (ours rendered by the model's renderer, TRL's by its chat template), the
prompt of the turn after a tool's reply, and the tools' replies to right and wrong calls.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from benchmarks.rl_throughput_sides.plan import Plan, training_order
from benchmarks.rl_throughput_sides.trl_side import question, rendered, tokenizer_for
from benchmarks.rl_throughput_sides.trl_tools import environment_class
from orchestrator.chat_renderer import build_renderer
from orchestrator.environments.toolsmith.episode import Episode, run_call

SAMPLE = 32


def compare(plan: Plan) -> dict[str, int]:
    """How many of the sample's tasks are the same on both sides, by what was compared."""
    tokenizer, (_, renderer) = tokenizer_for(plan), build_renderer(str(plan.model), None)
    episodes = training_order(plan)[:SAMPLE]
    same = {"tasks": len(episodes), "prompts": 0, "prompts as text": 0, "next turns": 0, "tool replies": 0}
    for episode in episodes:
        tools = [tool.schema() for tool in episode.tools]
        ours = renderer.render_ids(question(episode), tools=tools, add_generation_prompt=True)
        theirs = rendered(episode, tokenizer, tokenize=True)
        same["prompts"] += ours == theirs
        same["prompts as text"] += ours == tokenizer(rendered(episode, tokenizer))["input_ids"]
        same["next turns"] += _next_turn_same(renderer, tokenizer, episode, ours)
        same["tool replies"] += all(_reply_same(tokenizer, episode, ours, call) for call in _calls(episode))
    return same


def _next_turn_same(renderer: Any, tokenizer: Any, episode: Episode, prompt: list[int]) -> bool:
    name, arguments = _calls(episode)[0]
    completion = tokenizer(_call_text(name, arguments))["input_ids"]
    result = run_call(episode, name, json.dumps(arguments))
    bridge = [{"role": "tool", "tool_call_id": "call_0", "content": result}]
    ours = renderer.bridge_to_next_turn(prompt, completion, bridge).token_ids
    trainer = SimpleNamespace(processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False, chat_template=None,
                              chat_template_kwargs={})  # fmt: skip
    message = {"role": "tool", "name": name, "content": result}
    return ours == prompt + completion + GRPOTrainer._get_tool_suffix_ids(trainer, [message])


def _reply_same(tokenizer: Any, episode: Episode, prompt: list[int], call: tuple[str, dict[str, Any]]) -> bool:
    """TRL's way from the model's text to the tool's reply, against ours."""
    name, arguments = call
    instance = environment_class(episode)()
    methods = {tool.name: getattr(instance, f"tool_{index}") for index, tool in enumerate(episode.tools)}
    ids = tokenizer(_call_text(name, arguments))["input_ids"]
    message = parse_response(tokenizer, ids, prefix=prompt, tools=list(methods.values()))
    function = message["tool_calls"][0]["function"]
    return methods[function["name"]](**function["arguments"]) == run_call(episode, name, json.dumps(arguments))


def _calls(episode: Episode) -> list[tuple[str, dict[str, Any]]]:
    """The right first call, then one with wrong types, one without arguments, one with an unknown argument."""
    step = episode.steps[0]
    tool = episode.tool_for(step.operation)
    right = tool.encode(step.operands)
    swapped = {name: str(value) if isinstance(value, int) else int(value) for name, value in right.items()}
    return [(tool.name, right), (tool.name, swapped), (tool.name, {}), (tool.name, {**right, "zz": 1})]


def _call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


if __name__ == "__main__":
    print(json.dumps(compare(Plan.read(Path(sys.argv[1])))))
