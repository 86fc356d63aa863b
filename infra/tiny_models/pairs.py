"""python -m infra.tiny_models.pairs: preference pairs for replay-DPO, by votes of the three tiny teachers.

1. The policy plays training episodes of toolsmith at temperature 1. Each of its turns is a state: context and action.
2. At each state the three teachers give their own greedy answer, from the same token ids.
3. Answers are compared in canonical form. An answer of most teachers beats the policy's. The policy's answer, when
   most teachers agree with it, beats a minority's. Without a majority there is no pair; cut answers do not count.
   Neither does a majority whose call fails: each chosen call is run in its episode, and an error leaves the pair out.
4. pairs.jsonl, pairs.votes.jsonl (each teacher's vote at every state) and PAIRS.md are written to the assets.

Where teachers wrote the majority's answer differently, the one that the policy finds likeliest per token is taken. A
final answer is compared as text: in toolsmith it can be right or wrong, so it is more than prose.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from renderers.configs import Qwen3RendererConfig
from transformers import AutoTokenizer, Qwen3ForCausalLM

from composer_prime.data.pairs import Pair, PairState
from composer_prime.model_families import family_of
from composer_prime.traces.records import StateRecord, VoteRecord, digest
from infra.tiny_models.demonstrate import MAX_TURNS
from infra.tiny_models.make import ASSETS
from infra.tiny_models.play import MAX_NEW_TOKENS, complete, draw_episodes
from orchestrator.chat_renderer import ToolQwen3Renderer
from orchestrator.environments.tool_loop.harness import INVALID_CALL
from orchestrator.environments.toolsmith.taskset import Episode, is_error, run_call

TEACHERS = ("teacher_a", "teacher_b", "teacher_c")
_BATCH = 64
_OUTCOMES = {
    "majority beats the policy": "overruled",
    "the policy beats a minority": "agreed",
    "all agree with the policy": "agreed",
    "no majority": "no_majority",
    "the majority's call fails": "cannot_run",
    "the policy's answer was cut": "refused",
}
"""Their names in replay's records."""
_README = """# pairs.jsonl

{pairs} preference pairs of toolsmith, for replay-DPO before a replay of one's own traces exists
(`orchestrator.preferences.pairs = "tiny"`). Made by

    python -m infra.tiny_models.pairs --seed {seed} --episodes {episodes} --most {most}

from the models in this folder: the policy played {episodes} training episodes (no question of the eval split), and at
each of its {states} turns the three teachers gave their greedy answer, which pairs.votes.jsonl holds. Nothing else went
into the files. License: that of this repository.

A majority can agree on a call that fails. Such a pair would teach the error, so it was left out: every chosen call ran
without an error in its episode.

| | states |
|---|---|
{outcomes}

A pair's epsilon is 1 - (k + 1/2) / (n + 1) with k of n = 3 teachers for the chosen answer: 0.125 for three, 0.375 for
two. Each line holds the state, both answers, and every teacher's answer.
"""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One episode under way."""

    number: int
    episode: Episode
    messages: list[dict[str, Any]]
    prompt: list[int]
    turn: int = 0

    @property
    def tools(self) -> list[Any]:
        return [tool.schema() for tool in self.episode.tools]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A turn as a model wrote it."""

    message: dict[str, Any]
    canonical: str
    """Equal for answers with the same effect."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VotedState:
    """A turn of the policy, before which the teachers are asked as well."""

    trace: str
    turn: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    prompt: list[int]


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "policy")
    renderer = ToolQwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    models = {name: Qwen3ForCausalLM.from_pretrained(ASSETS / name).float().eval() for name in ("policy", *TEACHERS)}
    pairs: list[Pair] = []
    records: list[StateRecord] = []
    outcomes: Counter[str] = Counter()
    episodes = draw_episodes(options.episodes, seed=options.seed)
    for start in range(0, len(episodes), _BATCH):
        numbered = list(enumerate(episodes))[start : start + _BATCH]
        _play(models, renderer, numbered, options.seed, pairs, records, outcomes)
    kept = pairs[: options.most]
    last = next(index for index, record in enumerate(records) if kept[-1].pair_id in record.pairs)
    for name, lines in (("pairs.jsonl", kept), ("pairs.votes.jsonl", records[: last + 1])):
        (options.out / name).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    rows = "\n".join(f"| {name} | {count} |" for name, count in outcomes.most_common())
    (options.out / "PAIRS.md").write_text(
        _README.format(
            pairs=len(kept), states=sum(outcomes.values()), outcomes=rows, seed=options.seed,
            episodes=options.episodes, most=options.most,
        )
    )  # fmt: skip
    print(f"{len(kept)} of {len(pairs)} pairs from {sum(outcomes.values())} states: {dict(outcomes)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m infra.tiny_models.pairs", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder that gets pairs.jsonl and PAIRS.md")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--most", type=int, default=320, help="pairs to keep, in the order of the episodes")
    return parser.parse_args()


@torch.inference_mode()
def _play(
    models: dict[str, Qwen3ForCausalLM],
    renderer: ToolQwen3Renderer,
    episodes: list[tuple[int, Episode]],
    seed: int,
    pairs: list[Pair],
    records: list[StateRecord],
    outcomes: Counter[str],
) -> None:
    """Play the episodes with the policy, and let the teachers answer at each of its turns."""
    generator = torch.Generator().manual_seed(seed + episodes[0][0])
    live = [begin(number, episode, renderer) for number, episode in episodes]
    while live:
        prompts = [conversation.prompt for conversation in live]
        policy_turns = complete(models["policy"], renderer, prompts, 1.0, generator)
        teacher_turns = {name: complete(models[name], renderer, prompts, 0.0, generator) for name in TEACHERS}
        for index, conversation in enumerate(live):
            student = answer_of(renderer, policy_turns[index])
            votes = {name: answer_of(renderer, completions[index]) for name, completions in teacher_turns.items()}
            state = _state(conversation)
            outcome, pair = vote(state, student, votes, models["policy"])
            if pair is not None and call_fails(conversation, pair.chosen):
                outcome, pair = "the majority's call fails", None
            outcomes[outcome] += 1
            pairs += [pair] if pair is not None else []
            records.append(record_of(state, outcome, student, votes, pair, base="tiny"))
        live = [
            conversation
            for conversation, completion in zip(live, policy_turns, strict=True)
            if advance(conversation, completion, renderer)
        ]


def begin(number: int, episode: Episode, renderer: ToolQwen3Renderer) -> Conversation:
    messages: list[Any] = [{"role": "user", "content": episode.question}]
    made = Conversation(number=number, episode=episode, messages=messages, prompt=[])
    made.prompt = renderer.render(messages, tools=made.tools, add_generation_prompt=True).token_ids
    return made


def answer_of(renderer: ToolQwen3Renderer, completion: list[int]) -> Answer | None:
    """Return the answer, None when it was cut."""
    if completion[-1] not in renderer.get_stop_token_ids():
        return None
    message = message_of(renderer, completion)
    calls = [
        [call["function"]["name"], json.loads(call["function"]["arguments"])] for call in message.get("tool_calls", [])
    ]
    canonical = json.dumps(calls, sort_keys=True) if calls else message["content"].strip()
    return Answer(message=message, canonical=canonical, token_ids=tuple(completion))


def message_of(renderer: ToolQwen3Renderer, completion: list[int]) -> dict[str, Any]:
    parsed = renderer.parse_response(completion)
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
        for n, c in enumerate(parsed.tool_calls)
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _state(conversation: Conversation) -> VotedState:
    return VotedState(
        trace=f"toolsmith-{conversation.number:04d}", turn=conversation.turn, messages=conversation.messages,
        tools=conversation.tools, prompt=conversation.prompt,
    )  # fmt: skip


def vote(
    state: VotedState, student: Answer | None, votes: dict[str, Answer | None], base: Qwen3ForCausalLM
) -> tuple[str, Pair | None]:
    """Return the outcome of the vote and the pair, if any."""
    answers = {name: answer for name, answer in votes.items() if answer is not None}
    if student is None:
        return "the policy's answer was cut", None
    counts = Counter(answer.canonical for answer in answers.values())
    winner, count = counts.most_common(1)[0] if counts else ("", 0)
    if 2 * count <= len(votes):
        return "no majority", None
    majority = [answer for answer in answers.values() if answer.canonical == winner]
    minority = [answer for answer in answers.values() if answer.canonical != winner]
    if winner != student.canonical:
        chosen = max(majority, key=lambda answer: _likelihood(base, state.prompt, answer))
        return "majority beats the policy", _pair(state, chosen, student, count, votes)
    if minority:
        return "the policy beats a minority", _pair(state, student, minority[0], count, votes)
    return "all agree with the policy", None


def record_of(
    state: VotedState,
    outcome: str,
    student: Answer | None,
    votes: dict[str, Answer | None],
    pair: Pair | None,
    *,
    base: str,
) -> StateRecord:
    """Return the state's record. Nothing was paid; a state's own time in a batch is unknown."""
    own = student.canonical if student else None
    return StateRecord(
        trace=state.trace,
        state=f"{state.trace}/{state.turn:04d}",
        outcome=_OUTCOMES[outcome],
        votes=[
            VoteRecord(
                teacher=name, family=family_of(f"{base}/{name}"), form=digest(answer.canonical),
                agrees=answer.canonical == own, answer="", cached=False, cost_usd=0.0,
            )
            for name, answer in votes.items() if answer is not None
        ],
        pairs=[] if pair is None else [pair.pair_id],
    )  # fmt: skip


def _likelihood(base: Qwen3ForCausalLM, prompt: list[int], answer: Answer) -> float:
    """Return the mean log-probability of the answer's tokens."""
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    logprobs = base(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None]).mean().item()


def _pair(state: VotedState, chosen: Answer, rejected: Answer, count: int, votes: dict[str, Answer | None]) -> Pair:
    return Pair(
        trace=state.trace,
        state=PairState(state_id=f"{state.trace}/{state.turn:04d}", messages=list(state.messages), tools=state.tools),
        chosen=chosen.message,
        rejected=rejected.message,
        epsilon=1 - (count + 0.5) / (len(votes) + 1),
        teachers={name: None if answer is None else answer.canonical for name, answer in votes.items()},
    )


def replies_to(conversation: Conversation, message: dict[str, Any]) -> list[str]:
    """Return the tools' replies to a message; empty when it calls none."""
    replies = [
        run_call(conversation.episode, call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    return replies + ([INVALID_CALL] if "<tool_call>" in message["content"] else [])


def call_fails(conversation: Conversation, message: dict[str, Any]) -> bool:
    """Return whether a tool call of a message ends in an error, or is none."""
    return any(is_error(reply) for reply in replies_to(conversation, message))


def advance(conversation: Conversation, completion: list[int], renderer: ToolQwen3Renderer) -> bool:
    """Add the policy's turn and the tools' replies. Returns False when the conversation is over."""
    message = message_of(renderer, completion)
    replies = replies_to(conversation, message)
    conversation.turn += 1
    if not replies or len(completion) == MAX_NEW_TOKENS or conversation.turn == MAX_TURNS:
        return False
    tail: list[Any] = [
        {"role": "tool", "tool_call_id": f"call_{number}", "content": reply} for number, reply in enumerate(replies)
    ]
    bridged = renderer.bridge_to_next_turn(conversation.prompt, completion, tail, tools=conversation.tools)
    assert bridged is not None
    conversation.prompt = bridged.token_ids
    conversation.messages = [*conversation.messages, message, *tail]
    return True


if __name__ == "__main__":
    main()
