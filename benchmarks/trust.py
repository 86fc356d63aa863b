"""Catch nodes that cheat, and leave honest ones alone: eleven cheats against the audits of `orchestrator.audit`.

    python benchmarks/trust.py                          a few minutes on two cores

Every node answers the same requests, seeded as the gateway seeds them. An auditor in float32 checks each answer
(inference/audit.py), and a NodeTrust (orchestrator/swarm/trust.py) weighs the verdicts, as in a run. Each cheat is met
in `--lives` orders of its answers; the table has the tokens that it samples under audit until the evidence is above the
bound, median and 90th percentile.

    small       one layer of four left out           temperature  samples at 0.7, reports logprobs at 1
    stale       weights of --stale steps before      spliced      six tokens in the middle are somebody's text
    int8        weights rounded to int8 by row       invented     right tokens, logprobs off by 0.3 nats
    unswapped   weights of --unswapped steps before  draft        the small model's tokens, the right model's logprobs
    greedy      the likeliest token each time        early stop   half of the answer, then a stop
    foreign     draws of another seed

Honest nodes compute in float32 and in bfloat16, and one float32 node is audited in bfloat16. The exit status is 1 when
a cheat is not caught in every order at the tolerance for float32, when an honest node is quarantined or .1 % of
its answers are refused, or when the audits cost 3 % of generation or more, in CPU time. `--quick` meets few answers.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from benchmarks._shared import conclude
from composer_prime.config.inference import InferenceConfig
from composer_prime.wire.node_messages import AuditRequest, PartVerdict, Sampling
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from inference.audit import OpenAudit, judge
from inference.engines.base import Engine
from inference.engines.local.local_engine import LocalEngine
from orchestrator.swarm.trust import NodeTrust, is_clean

ASSETS = Path(__file__).parents[1] / "composer_prime" / "assets" / "tiny"
POLICY = ASSETS / "policy"
CONTEXT = 1024
MAX_REFUSED, MAX_COST = 1e-3, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    prompt_ids: list[int]
    sampling: Sampling
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass(slots=True, kw_only=True)
class Audited:
    """A node's answers and what the audit said of them."""

    name: str
    answers: list[Answer] = field(default_factory=list)
    verdicts: list[PartVerdict] = field(default_factory=list)
    generated_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(verdict.tokens for verdict in self.verdicts)


def prompts() -> list[list[int]]:
    """The shipped tasks' conversations, as the policy's prompts."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY, local_files_only=True)
    found = []
    for line in (ASSETS / "pairs.jsonl").read_text().splitlines():
        state = json.loads(line)["state"]
        text = tokenizer.apply_chat_template(
            state["messages"], tools=state["tools"], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found += [ids] if len(ids) < CONTEXT // 2 else []
    return found


def request(name: str, number: int, all_prompts: list[list[int]], max_tokens: int) -> tuple[list[int], Sampling]:
    seed = int.from_bytes(hashlib.blake2b(f"{name}/{number}".encode(), digest_size=8).digest(), "little") >> 11
    return all_prompts[number % len(all_prompts)], Sampling(max_tokens=max_tokens, seed=seed)


async def generate(engine: Engine, requests: Iterable[tuple[list[int], Sampling]], tag: str) -> list[Answer]:
    async def one(number: int, prompt: list[int], sampling: Sampling) -> Answer:
        done = await engine.generate(f"{tag}-{number}", prompt, sampling, f"{tag}-{number}")
        return Answer(
            prompt_ids=prompt,
            sampling=sampling,
            token_ids=done.ids.tolist(),
            logprobs=done.token_logprobs.tolist(),
            finish_reason=done.finish_reason,
        )

    return await asyncio.gather(*(one(number, *asked) for number, asked in enumerate(requests)))


def settings(**values: object) -> InferenceConfig:
    return InferenceConfig.model_validate({"device": "cpu", "threads": 2, "local": {"max_batch": 32}} | values)


async def started(folder: Path, dtype: str) -> LocalEngine:
    made = LocalEngine(folder, settings(dtype=dtype), CONTEXT)
    await made.start()
    return made


async def check(auditor: LocalEngine, answers: list[Answer], tolerance: float) -> list[PartVerdict]:
    """Audit answers together."""
    return await asyncio.gather(*(_checked(auditor, answer, tolerance) for answer in answers))


async def _checked(auditor: LocalEngine, answer: Answer, tolerance: float) -> PartVerdict:
    audit = OpenAudit(
        AuditRequest(
            audit=0,
            prompt_ids=pack_ints(answer.prompt_ids),
            token_ids=pack_ints(answer.token_ids),
            logprobs=pack_floats(answer.logprobs),
            sampled_by=[("n", len(answer.token_ids))],
            version_spans=[VersionSpan(0, len(answer.token_ids), 0)],
            finish_reason=answer.finish_reason,
            sampling=answer.sampling,
            tolerance=tolerance,
        )
    )
    await audit.score(auditor, 0)
    stop = await auditor.find_stop(np.array(answer.token_ids, np.int32), answer.sampling)
    return judge(audit, stop).parts[0]


async def rescored(engine: LocalEngine, answer: Answer) -> Answer:
    """The answer with the logprobs that `engine` gives its tokens."""
    tokens = np.array(answer.prompt_ids + answer.token_ids, np.int32)
    _, logprobs = await engine.check_draws(tokens, len(answer.prompt_ids), answer.sampling)
    return replace(answer, logprobs=logprobs.tolist())


# -- weights -------------------------------------------------------------------------------------------------------


def changed(folder: Path, name: str, change: Callable[[str, torch.Tensor], torch.Tensor], **config: object) -> Path:
    """Copy the policy to `folder`/`name` with changed tensors, in float32."""
    target = folder / name
    shutil.copytree(POLICY, target)
    tensors = {key: change(key, tensor.float()) for key, tensor in load_file(POLICY / "model.safetensors").items()}
    values = json.loads((POLICY / "config.json").read_text()) | {"dtype": "float32"} | config
    layers = values["num_hidden_layers"]
    kept = {key: tensor for key, tensor in tensors.items() if not _is_beyond(key, layers)}
    values["layer_types"] = values["layer_types"][:layers]
    save_file({key: tensor.contiguous() for key, tensor in kept.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(values))
    return target


def _is_beyond(key: str, layers: int) -> bool:
    parts = key.split(".")
    return "layers" in parts and int(parts[parts.index("layers") + 1]) >= layers


def steps_before(steps: int, lr: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Move each weight by `lr` a step, in a direction of its own."""
    generator = torch.Generator().manual_seed(1)
    return lambda _, tensor: tensor + steps * lr * torch.randn(tensor.shape, generator=generator).sign()


def rounded_to_int8(_: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2:
        return tensor
    scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (tensor / scale).round() * scale


# -- nodes ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Bench:
    args: argparse.Namespace
    folder: Path
    prompts: list[list[int]]
    right: LocalEngine
    """The policy in float32: what cheats copy logprobs from, and the auditor."""

    def requests(self, name: str, count: int) -> list[tuple[list[int], Sampling]]:
        return [request(name, number, self.prompts, self.args.tokens) for number in range(count)]

    async def answers(self, name: str, node: Engine | Path, **sampling: object) -> Audited:
        """What a node answers, or one with the weights in a folder; settings that differ from the request's."""
        if isinstance(node, Path):
            made = await started(node, "float32")
            answered = await self.answers(name, made, **sampling)
            await made.close()
            return answered
        asked = [(ids, msgspec.structs.replace(one, **sampling)) for ids, one in self.requests(name, self.args.pool)]
        answers = await generate(node, asked, name)
        wanted = self.requests(name, self.args.pool)
        answers = [replace(one, sampling=sampling) for one, (_, sampling) in zip(answers, wanted, strict=True)]
        return Audited(name=name, answers=answers)

    async def drawing_cheats(self, node: Engine | Path) -> list[Audited]:
        greedy = await self.answers("greedy", node, temperature=0.0)
        cold = await self.answers("temperature", node, temperature=0.7)
        cold.answers = [await rescored(self.right, answer) for answer in cold.answers]
        return [greedy, cold, await self.answers("foreign", node, seed=1)]

    async def cheats(self) -> list[Audited]:
        small = changed(self.folder, "small", lambda _, tensor: tensor, num_hidden_layers=3)
        stale = changed(self.folder, "stale", steps_before(self.args.stale, self.args.lr))
        unswapped = changed(self.folder, "unswapped", steps_before(self.args.unswapped, self.args.lr))
        int8 = changed(self.folder, "int8", rounded_to_int8)
        weights = {"small": small, "stale": stale, "int8": int8, "unswapped": unswapped}
        made = [await self.answers(name, folder) for name, folder in weights.items()]
        right = await self.answers("right", POLICY)
        drawn = await self.drawing_cheats(POLICY)
        draft = replace(made[0], name="draft")
        draft.answers = [await rescored(self.right, answer) for answer in made[0].answers]
        spliced = Audited(name="spliced", answers=[await self.spliced(answer) for answer in right.answers])
        random = np.random.default_rng(0)
        noisy = lambda logprobs: np.minimum(0, np.array(logprobs) + random.normal(0, 0.3, len(logprobs))).tolist()
        invented = [replace(one, logprobs=noisy(one.logprobs)) for one in right.answers]
        early = Audited(name="early stop", answers=[await self.cut(answer) for answer in right.answers])
        return [*made, *drawn, spliced, Audited(name="invented", answers=invented), draft, early]

    async def spliced(self, answer: Answer) -> Answer:
        ids, middle = list(answer.token_ids), len(answer.token_ids) // 2
        foreign = self.prompts[0][3 : 3 + min(6, len(ids) - middle)]
        ids[middle : middle + len(foreign)] = foreign
        return await rescored(self.right, replace(answer, token_ids=ids))

    async def cut(self, answer: Answer) -> Answer:
        ids = [*answer.token_ids[: len(answer.token_ids) // 2], self.args.eos]
        return await rescored(self.right, replace(answer, token_ids=ids, finish_reason="stop"))


def tokens_to_catch(node: Audited, lives: int) -> list[float]:
    """Tokens under audit until the bound is passed, for each order of the answers; infinite when it never is."""
    caught = []
    for life in range(lives):
        order = np.random.default_rng(life).permutation(len(node.verdicts))
        trust, tokens = NodeTrust(), 0
        for index in order:
            tokens += node.verdicts[index].tokens
            if trust.note(node.verdicts[index]):
                break
        else:
            tokens = float("inf")
        caught.append(tokens)
    return caught


def quarantines(node: Audited, lives: int) -> int:
    """In how many orders of the answers an honest node is quarantined."""
    return sum(np.isfinite(tokens_to_catch(node, lives)))


# -- the tables ----------------------------------------------------------------------------------------------------


async def honest_row(
    bench: Bench, name: str, node: Engine, auditor: LocalEngine, tolerance: float
) -> tuple[bool, float]:
    """Print an honest node. Returns whether it was left alone, and the audit's CPU seconds for one of generation."""
    args = bench.args
    honest, checked_s = Audited(name=name), 0.0
    wanted = bench.requests(f"honest-{name}", args.answers)
    for batch in (wanted[first : first + 256] for first in range(0, len(wanted), 256)):
        start = time.process_time()
        honest.answers = await generate(node, batch, name)
        honest.generated_s += time.process_time() - start
        start = time.process_time()
        honest.verdicts += await check(auditor, honest.answers, tolerance)
        checked_s += time.process_time() - start
    refused = sum(not is_clean(verdict) for verdict in honest.verdicts) / len(honest.verdicts)
    caught = quarantines(honest, args.lives)
    gaps = [verdict.gap_mean for verdict in honest.verdicts]
    worst = max(verdict.gap_max for verdict in honest.verdicts)
    cost = checked_s / honest.generated_s
    audit_dtype = "float32" if auditor is bench.right else "bfloat16"
    print(f"{name:<12}{audit_dtype:<10}{tolerance:>9g}{len(honest.verdicts):>9}{honest.tokens:>9}{refused:>9.2%}"
          f"{caught:>8}/{args.lives:<3}{np.mean(gaps):>10.1e}{worst:>9.1e}{cost:>11.2f}")  # fmt: skip
    return caught == 0 and refused < MAX_REFUSED, cost


async def honest_rows(bench: Bench, auditor_bf16: LocalEngine) -> tuple[bool, float]:
    """Print the honest nodes. Returns whether all were left alone, and the cost where all compute in float32."""
    args, rows = bench.args, []
    print(f"{'honest node':<12}{'auditor':<10}{'tolerance':>9}{'answers':>9}{'tokens':>9}{'refused':>9}"
          f"{'quarantined':>12}{'mean gap':>10}{'max gap':>9}{'audit/gen':>11}")  # fmt: skip
    for dtype, auditor in (("float32", bench.right), ("bfloat16", bench.right), ("float32", auditor_bf16)):
        tolerance = args.tight if dtype == "float32" and auditor is bench.right else args.tolerance
        node = await started(POLICY, dtype)
        rows.append(await honest_row(bench, dtype, node, auditor, tolerance))
        await node.close()
    return all(fine for fine, _ in rows), rows[0][1]


async def cheat_rows(bench: Bench, nodes: list[Audited]) -> bool:
    """Print the cheats under both tolerances. Returns whether each was caught in every order."""
    args, fine = bench.args, True
    print(f"\n{'cheat':<13}{'tolerance':>10}{'wrong tokens':>13}{'median':>8}{'p90':>8}{'caught':>9}")
    for node in nodes:
        for tolerance in (args.tight, args.tolerance):
            node.verdicts = await check(bench.right, node.answers, tolerance)
            wrong = sum(len(verdict.wrong) for verdict in node.verdicts) / node.tokens
            caught = tokens_to_catch(node, args.lives)
            times = int(np.isfinite(caught).sum())
            fine &= times == len(caught) or tolerance != args.tight
            print(f"{node.name:<13}{tolerance:>10g}{wrong:>13.1%}{np.median(caught):>8.0f}"
                  f"{np.quantile(caught, 0.9, method='higher'):>8.0f}{times:>6}/{args.lives}")  # fmt: skip
    return fine


async def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(2)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        right = await started(POLICY, "float32")
        bench = Bench(args=args, folder=Path(folder), prompts=prompts(), right=right)
        narrow = await started(POLICY, "bfloat16")
        left_alone, ratio = await honest_rows(bench, narrow)
        await narrow.close()
        all_caught = await cheat_rows(bench, await bench.cheats())
        await right.close()
    print(f"\n{time.monotonic() - start:.0f} s in all")
    answers = [
        (f"every cheat is caught at tolerance {args.tight:g} in {args.pool} answers", all_caught),
        (f"no honest node is quarantined, and less than {MAX_REFUSED:.1%} of its answers refused", left_alone),
    ]
    cost = args.floor * ratio
    text = f"audits at the floor of {args.floor:.0%} cost {cost:.2%} of generation, below {MAX_COST:.0%}"
    return conclude([*answers, (text, cost < MAX_COST)], is_quick=args.quick)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=400, help="honest answers of each kind of node")
    parser.add_argument("--pool", type=int, default=64, help="answers of each cheat")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--lives", type=int, default=20, help="orders in which a node's answers are met")
    parser.add_argument("--tight", type=float, default=1e-4, help="tolerance where all compute in float32")
    parser.add_argument("--tolerance", type=float, default=0.05, help="tolerance where some compute in bfloat16")
    parser.add_argument("--floor", type=float, default=0.02, help="audited share of a known node's answers")
    parser.add_argument("--stale", type=int, default=3, help="steps that stale weights are behind")
    parser.add_argument("--unswapped", type=int, default=30, help="steps since a node swapped last")
    parser.add_argument("--lr", type=float, default=2e-4, help="how far a step moves each weight")
    parser.add_argument("--eos", type=int, default=2, help="the policy's end-of-sequence token")
    parser.add_argument("--quick", action="store_true", help="few answers and orders: whether it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.answers, arguments.pool, arguments.lives, arguments.tokens = 16, 24, 4, 24
    raise SystemExit(asyncio.run(main(arguments)))
