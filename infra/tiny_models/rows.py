"""python -m infra.tiny_models.rows FILE: toolsmith conversations without a mistake, as rows for SFT (configs/sft.toml).

Questions come from the training split or, with --split eval, from the held-out one, which the evaluation plays too.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from orchestrator.environments.toolsmith.taskset import MAX_DIFFICULTY, MIN_DIFFICULTY, Episode, generate, run_call


def conversation(episode: Episode) -> dict[str, Any]:
    """Return the row of an episode that is played right."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": episode.question}]
    value = None
    for number, step in enumerate(episode.steps):
        tool = episode.tool_for(step.operation)
        operands = step.operands if value is None else (int(value), *step.operands[1:])
        arguments = json.dumps(tool.encode(operands))
        call = {"id": f"call_{number}", "type": "function", "function": {"name": tool.name, "arguments": arguments}}
        value = run_call(episode, tool.name, arguments)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": value})
    messages.append({"role": "assistant", "content": str(int(value or 0))})
    return {"messages": messages, "tools": [tool.schema() for tool in episode.tools]}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m infra.tiny_models.rows", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=1024, help="rows")
    parser.add_argument("--split", choices=("train", "eval"), default="train")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(f"rows/{options.split}/{options.seed}")
    options.file.parent.mkdir(parents=True, exist_ok=True)
    with options.file.open("w") as file:
        for _ in range(options.count):
            difficulty = rng.randint(MIN_DIFFICULTY, MAX_DIFFICULTY)
            episode = generate(seed=rng.getrandbits(53), difficulty=difficulty, split=options.split)
            file.write(json.dumps(conversation(episode)) + "\n")


if __name__ == "__main__":
    main()
