"""Audit many short answers: how often an honest node is refused, and how soon hidden changes of the weights are found.

    python benchmarks/trust_scale.py --state FOLDER --seconds 540     continues the last call with it
    python benchmarks/trust_scale.py --state FOLDER --seconds 0       the tables alone, at any --tolerance

`benchmarks/trust.py` meets few answers of real engines, and eleven cheats. This one computes batches of answers with
transformers and the published rule of drawing, and judges them with the product's code (inference/audit.py,
orchestrator/swarm/trust.py). Prompts are the ends of the shipped conversations, of 16 to 31 tokens, with `--each`
answers to one, of other seeds. The auditor computes in float32, with the shipped policy as the claimed version. A step
moves each weight by `--lr` up or down, in a direction of its own. The answers are compared with versions 2 and 8 steps
older, the oldest ones with trainer.weights.keep at 3 and at 9, and with the policy's linear layers in int8 by row.

    honest32, honest16          the policy in float32 and in bfloat16
    eager16                     the same in bfloat16, with another attention kernel
    stale2, stale10, stale30    so many steps old, in bfloat16
    lying                       stale10, with normal noise of 0.02 nats on its logprobs
    int8                        the policy with all matrices rounded to int8 by row, in bfloat16
    int8groups, fp8             the same, by groups of 64 and to e4m3 by row

honest32 is judged at a tolerance of 0.0001 and the others at each `--tolerance`. Printed are the answers refused, with
the upper end of the exact 95 % interval (Clopper-Pearson), and the lives that end in a quarantine at the last
tolerance. A life is `--life` answers of an honest node in a row, or all of another node's in one of `--lives` orders.
`median` and `p90` are tokens under audit until then. `audit/gen` is CPU time of one scoring pass over that of
generation. Exit status 1: an honest node was quarantined, or .1 % of the answers of honest32 or honest16 were refused
at the last tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import beta
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from composer_prime.wire.audit import AuditRequest, PartVerdict
from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from inference.audit import OpenAudit, judge
from inference.engines.sampling import SamplingRows, draw_misses, sample
from orchestrator.swarm.trust import NodeTrust, is_clean

ASSETS = Path(__file__).parents[1] / "composer_prime" / "assets" / "tiny"
EOS = 2
MAX_REFUSED = 1e-3
HONEST = ("honest16", "honest32", "eager16")
STALE = {"stale2": 2, "stale10": 10, "stale30": 30, "lying": 10}
ROUNDED = ("int8", "int8groups", "fp8")
SUSPECTS = {"2 steps": 2, "8 steps": 8, "int8": 0}
SHORTEST_PROMPT, PROMPT_LENGTHS = 16, 16
GROUP = 64


class Models:
    """The policy, and what cheats have in its place. One node's is loaded at a time, beside the auditor's."""

    def __init__(self, lr: float) -> None:
        self._lr = lr
        self.right = self.load("", 0, torch.float32)
        self.suspects = {name: self.load(name, steps, torch.float32) for name, steps in SUSPECTS.items()}
        for (name, tensor), right in zip(
            self.suspects["int8"].named_parameters(), self.right.parameters(), strict=True
        ):
            if "embed" in name:  # Loaders leave the embeddings alone.
                tensor.data.copy_(right)
        self._node: tuple[str, torch.nn.Module] | None = None

    def node(self, name: str) -> torch.nn.Module:
        if self._node is None or self._node[0] != name:
            dtype = torch.float32 if name == "honest32" else torch.bfloat16
            self._node = (name, self.load(name, STALE.get(name, 0), dtype))
        return self._node[1]

    def load(self, name: str, steps: int, dtype: torch.dtype) -> torch.nn.Module:
        """Load weights `steps` old. The newest steps are the same for all, so one went through the other's weights."""
        kernel = "eager" if name == "eager16" else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(
            ASSETS / "policy", dtype=torch.float32, attn_implementation=kernel
        ).eval()
        with torch.no_grad():
            for step in range(steps):
                generator = torch.Generator().manual_seed(step)
                for tensor in model.parameters():
                    tensor += self._lr * torch.randn(tensor.shape, generator=generator).sign()
            for tensor in model.parameters() if name in ROUNDED else ():
                if tensor.dim() == 2:
                    tensor.copy_(rounded(tensor, name))
        return model if dtype == torch.float32 else model.bfloat16()


def rounded(tensor: torch.Tensor, name: str) -> torch.Tensor:
    rows = tensor.reshape(-1, GROUP) if name == "int8groups" else tensor
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (448 if name == "fp8" else 127)
    values = (rows / scale).to(torch.float8_e4m3fn).float() if name == "fp8" else (rows / scale).round()
    return (values * scale).reshape(tensor.shape)


def conversations() -> list[list[int]]:
    """The shipped conversations up to the answer, as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "policy", local_files_only=True)
    found = []
    for line in (ASSETS / "pairs.jsonl").read_text().splitlines():
        state = json.loads(line)["state"]
        text = tokenizer.apply_chat_template(
            state["messages"], tools=state["tools"], tokenize=False, add_generation_prompt=True
        )
        found.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [ids for ids in found if len(ids) >= SHORTEST_PROMPT + PROMPT_LENGTHS]


def rows(seeds: np.ndarray, positions: np.ndarray) -> SamplingRows:
    count = len(seeds)
    return SamplingRows(
        temperature=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int64),
        top_p=np.ones(count, np.float32),
        seed=seeds,
        position=positions.astype(np.uint64),
    )


def read(model: torch.nn.Module, prompts: np.ndarray, each: int) -> tuple[DynamicCache, torch.Tensor]:
    """Read prompts [P, T] once. Returns the cache and the next logits [P * each, V] of `each` answers to each."""
    cache = DynamicCache()
    logits = model(torch.from_numpy(prompts), past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    cache.batch_repeat_interleave(each)
    return cache, logits.repeat_interleave(each, 0)


def generate(model: torch.nn.Module, prompts: np.ndarray, seeds: np.ndarray, tokens: int) -> tuple[np.ndarray, ...]:
    """prompts [P, T], seeds [A] -> tokens int64 [A, T_new] and logprobs float32 [A, T_new], token by token."""
    cache, logits = read(model, prompts, len(seeds) // len(prompts))
    drawn = []
    for step in range(tokens):
        if step:
            ids = torch.from_numpy(drawn[-1][0])[:, None]
            logits = model(ids, past_key_values=cache, use_cache=True).logits[:, -1]
        drawn.append(sample(logits, rows(seeds, np.full(len(seeds), prompts.shape[1] + step))))
    return tuple(np.stack(parts, axis=1) for parts in zip(*drawn, strict=True))


def score(model: torch.nn.Module, prompts: np.ndarray, seeds: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, ...]:
    """Misses and logprobs, each [A, T_new], of drawn tokens [A, T_new], all in one pass behind the prompts'."""
    cache, first = read(model, prompts, len(seeds) // len(prompts))
    later = model(torch.from_numpy(drawn[:, :-1]), past_key_values=cache, use_cache=True).logits
    logits = torch.cat([first[:, None], later], dim=1)
    positions = np.tile(prompts.shape[1] + np.arange(drawn.shape[1]), len(drawn))
    scored = draw_misses(logits.flatten(0, 1), rows(np.repeat(seeds, drawn.shape[1]), positions), drawn.reshape(-1))
    return tuple(part.reshape(drawn.shape) for part in scored)


@torch.inference_mode()
def audited(models: Models, name: str, asked: list[list[int]], number: int, args: argparse.Namespace) -> dict:
    """Return batch `number` of a node: arrays by answer or token, and the CPU seconds of generation and passes."""
    random = np.random.default_rng([number, *name.encode()])
    length = SHORTEST_PROMPT + number % PROMPT_LENGTHS
    prompts = np.array([ids[-length:] for ids in asked])
    seeds = random.integers(0, 2**53, len(prompts) * args.each).astype(np.uint64)
    model, clock = models.node(name), [time.process_time()]
    drawn, claimed = generate(model, prompts, seeds, args.tokens)
    clock.append(time.process_time())
    scored = {"own": score(models.right, prompts, seeds, drawn)}
    clock.append(time.process_time())
    is_compared = name not in HONEST or number * len(seeds) < args.compared
    for key, suspect in models.suspects.items():
        unknown = np.full(drawn.shape, np.nan)
        scored[key] = score(suspect, prompts, seeds, drawn) if is_compared else (unknown, unknown)
    if name == "lying":
        claimed = np.minimum(claimed + random.normal(0, 0.02, claimed.shape), 0).astype(np.float32)
    ends = np.where((drawn == EOS).any(1), (drawn == EOS).argmax(1) + 1, args.tokens)
    kept = np.arange(args.tokens) < ends[:, None]
    values = {}
    for key, (misses, logprobs) in scored.items():
        values |= {f"{key} misses": misses[kept].astype(np.float32), f"{key} logprobs": logprobs[kept]}
    return values | {
        "claimed": claimed[kept],
        "ends": ends,
        "stops": drawn[np.arange(len(ends)), ends - 1] == EOS,
        "prompts": length * len(prompts) + np.repeat(np.arange(len(prompts)), args.each),
        "seconds": np.diff(clock),
        "load": np.array(os.getloadavg()[0]),
    }


# -- the tables ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Answers:
    """All answers of a node, as arrays by answer or by token."""

    name: str
    values: dict[str, np.ndarray]
    seconds: np.ndarray
    """[batches, 2]: CPU time of generation and of a pass."""
    loads: list[float]

    def verdicts(self, tolerance: float, suspect: str) -> list[PartVerdict]:
        """Judge all answers. Those that were not compared with `suspect` have no counts."""
        values, ends = self.values, np.cumsum(self.values["ends"])
        found = []
        for number, (end, tokens, stops) in enumerate(zip(ends, values["ends"], values["stops"], strict=True)):
            part = slice(end - tokens, end)
            request = AuditRequest(
                audit=number,
                prompt_ids=b"",
                token_ids=pack_ints(np.zeros(tokens, np.int32)),
                logprobs=pack_floats(values["claimed"][part]),
                parts=[int(tokens)],
                version_spans=[VersionSpan(0, int(tokens), 1)],
                finish_reason="stop" if stops else "length",
                sampling=Sampling(max_tokens=int(tokens)),
                tolerance=tolerance,
            )
            audit = OpenAudit(request, in_int8=suspect == "int8")
            audit.misses[:], audit.logprobs[:] = values["own misses"][part], values["own logprobs"][part]
            scored = values[f"{suspect} misses"][part], values[f"{suspect} logprobs"][part]
            audit.suspect_scores = scored if np.isfinite(scored[0]).all() else None
            found += judge(audit, int(tokens) if stops else None).parts
        return found

    def lives(self, args: argparse.Namespace) -> Iterator[np.ndarray]:
        """Yield the order in which each life meets the answers."""
        count = len(self.values["ends"])
        if self.name in HONEST:
            for first in range(0, count, args.life):
                yield np.arange(first, min(first + args.life, count))
        else:
            for life in range(args.lives):
                yield np.random.default_rng(life).permutation(count)


def stored(folder: Path, name: str) -> Answers | None:
    batches = [dict(np.load(path)) for path in sorted(folder.glob(f"{name}-?????.npz"))]
    if not batches:
        return None
    seconds = np.stack([batch.pop("seconds") for batch in batches])
    loads = [float(batch.pop("load")) for batch in batches]
    values = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    return Answers(name=name, values=values, seconds=seconds, loads=loads)


def upper(count: int, of: int) -> float:
    """Return the upper end of the exact 95 % interval of a share."""
    return 1.0 if count == of else float(beta.ppf(0.975, count + 1, of - count))


def print_refused(nodes: list[Answers], args: argparse.Namespace) -> dict[str, float]:
    """Print what is refused of each node. Returns its share at the last tolerance, by node."""
    shares = {}
    print(f"\n{'node':<11}{'tolerance':>10}{'answers':>9}{'tokens':>8}{'refused':>9}{'up to':>9}{'mean gap':>10}"
          f"{'max gap':>9}{'max miss':>10}{'audit/gen':>11}{'load':>8}")  # fmt: skip
    for node in nodes:
        values = node.values
        gaps = np.abs(values["claimed"] - values["own logprobs"])
        spent = node.seconds.sum(0)
        for tolerance in tolerances(node, args):
            verdicts = node.verdicts(tolerance, "int8")
            refused = sum(not is_clean(verdict) for verdict in verdicts)
            shares[node.name] = refused / len(verdicts)
            print(f"{node.name:<11}{tolerance:>10g}{len(verdicts):>9}{len(gaps):>8}{refused:>9}"
                  f"{upper(refused, len(verdicts)):>9.1e}{gaps.mean():>10.1e}{gaps.max():>9.1e}"
                  f"{values['own misses'].max():>10.1e}{spent[1] / spent[0]:>11.2f}"
                  f"{min(node.loads):>5.0f}-{max(node.loads):.0f}")  # fmt: skip
    return shares


def print_caught(nodes: list[Answers], args: argparse.Namespace) -> bool:
    """Print what suspects show, at the last tolerance. Returns whether no honest node was quarantined."""
    fine = True
    print(f"\n{'node':<11}{'suspect':>9}{'compared':>10}{'leaning':>9}{'draws':>11}{'nats':>7}{'caught':>9}"
          f"{'median':>8}{'p90':>8}")  # fmt: skip
    for node in nodes:
        for suspect in SUSPECTS:
            verdicts = node.verdicts(tolerances(node, args)[-1], suspect)
            met = [until_caught(verdicts, node.values["prompts"], order) for order in node.lives(args)]
            times = [tokens for tokens, _ in met]
            caught = int(np.isfinite(times).sum())
            fine &= caught == 0 or node.name not in HONEST
            leaning, compared = np.sum([verdict.by_logprob for verdict in verdicts], axis=0)
            draws = "{}/{}".format(*np.sum([verdict.by_draw for verdict in verdicts], axis=0))
            print(f"{node.name:<11}{suspect:>9}{compared:>10}{leaning / max(1, compared):>9.3f}{draws:>11}"
                  f"{max(most for _, most in met):>7.1f}{caught:>6}/{len(met):<3}{np.median(times):>7.0f}"
                  f"{np.quantile(times, 0.9, method='higher'):>8.0f}")  # fmt: skip
    return fine


def tolerances(node: Answers, args: argparse.Namespace) -> list[float]:
    return [1e-4] if node.name == "honest32" else args.tolerance


def until_caught(verdicts: list[PartVerdict], prompts: np.ndarray, order: np.ndarray) -> tuple[float, float]:
    """Meet answers in order: tokens until the node is quarantined, infinite when it is not, and the most evidence."""
    trust, total, most = NodeTrust(), 0, 0.0
    for index in order:
        total += verdicts[index].tokens
        caught = trust.note(verdicts[index], int(prompts[index]))
        most = max(most, *trust.suspect_evidence[verdicts[index].suspect])
        if caught is not None:
            return total, most
    return float("inf"), most


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    args.state.mkdir(exist_ok=True)
    start, made = time.monotonic(), 0
    if args.seconds > 0:
        models, asked = Models(args.lr), conversations()
        for name in args.nodes:
            wanted = args.answers if name in HONEST else args.pool
            for number in range(-(-wanted // (len(asked) * args.each))):
                path = args.state / f"{name}-{number:05}.npz"
                if path.exists() or time.monotonic() - start >= args.seconds:
                    continue
                np.savez(args.state / "unfinished.npz", **audited(models, name, asked, number, args))
                (args.state / "unfinished.npz").replace(path)
                made += 1
    print(f"{made} batches in {time.monotonic() - start:.0f} s, {time.process_time():.0f} CPU s in all")
    nodes = [node for name in args.nodes if (node := stored(args.state, name))]
    shares = print_refused(nodes, args)
    answers = [("no honest node is quarantined", print_caught(nodes, args))]
    for name in ("honest32", "honest16"):
        if (share := shares.get(name)) is not None:
            text = f"{name}: {share:.3%} of the answers refused at the last tolerance, below {MAX_REFUSED:.1%}"
            answers.append((text, share < MAX_REFUSED))
    for text, is_good in answers:
        print(f"{'met   ' if is_good else 'MISSED'} {text}")
    return int(not all(is_good for _, is_good in answers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="folder that results are added to")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no batch after so long")
    parser.add_argument("--nodes", nargs="+", default=[*HONEST, *STALE, *ROUNDED], help="which ones, in order")
    parser.add_argument("--answers", type=int, default=100_000, help="of each honest node")
    parser.add_argument("--compared", type=int, default=7_680, help="of them, the first so many, with suspect weights")
    parser.add_argument("--pool", type=int, default=2560, help="answers of each other node")
    parser.add_argument("--each", type=int, default=8, help="answers to one prompt in a batch")
    parser.add_argument("--tokens", type=int, default=8, help="longest answer")
    parser.add_argument("--life", type=int, default=10_000, help="answers of an honest node's life")
    parser.add_argument("--lives", type=int, default=20, help="orders in which the others' answers are met")
    parser.add_argument("--tolerance", type=float, nargs="+", default=[0.02, 0.05], help="of all but honest32")
    parser.add_argument("--lr", type=float, default=2e-4, help="how far a step moves each weight")
    parser.add_argument("--threads", type=int, default=1)
    raise SystemExit(main(parser.parse_args()))
