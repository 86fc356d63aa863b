"""Audit many short answers: how often an honest node is refused, and how soon old weights are found.

    python benchmarks/trust_scale.py --state out.jsonl --seconds 540     goes on where the last call with it ended
    python benchmarks/trust_scale.py --state out.jsonl --seconds 0       the tables alone

`benchmarks/trust.py` meets few answers of real engines, and eleven cheats. This one computes batches of answers with
transformers and the published rule of drawing, and judges them with the product's code (inference/audit.py,
orchestrator/audit/trust.py). Prompts are the ends of the shipped conversations, of 16 to 31 tokens. The auditor
computes in float32, with the shipped policy as the claimed version. A step moves each weight by `--lr` up or down, in a
direction of its own. The answers are compared with versions 2 and 8 steps older, the oldest ones with
trainer.weights.keep at 3 and at 9.

    honest32, honest16          the policy in float32 and in bfloat16
    stale2, stale10, stale30    so many steps old, in bfloat16
    lying                       stale10, with normal noise of 0.02 nats on its logprobs
    int8                        the policy with weights rounded to int8 by row, in bfloat16

The tolerance is 0.0001 for honest32 and `--tolerance` for the others. Printed are the answers refused, with the upper
end of the exact 95 % interval (Clopper-Pearson), and the lives that end in a quarantine. A life is `--life` answers of
an honest node in a row, or all of another node's in one of `--lives` orders. `median` and `p90` are tokens under audit
until then. `audit/gen` is CPU time of one scoring pass over that of generation. Exit status 1: an honest node was
quarantined.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import beta
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from composer_prime.wire.audit import AuditRequest, AuditVerdict
from composer_prime.wire.node import Sampling
from composer_prime.wire.types import VersionSpan, pack_floats, pack_ints
from inference.audit import OpenAudit, judge
from inference.engines.sampling import SamplingRows, draw_misses, sample
from orchestrator.audit.trust import NodeTrust

ASSETS = Path(__file__).parents[1] / "composer_prime" / "assets" / "tiny"
EOS = 2
HONEST = {"honest32": torch.float32, "honest16": torch.bfloat16}
STALE = {"stale2": 2, "stale10": 10, "stale30": 30, "lying": 10}
OLDER = (2, 8)
SHORTEST_PROMPT, PROMPT_LENGTHS = 16, 16


class Models:
    """The policy, and what cheats have in its place. One node's is loaded at a time, beside the auditor's."""

    def __init__(self, lr: float) -> None:
        self._lr = lr
        self.right = self.load("honest32", 0, torch.float32)
        self.older = [self.load("older", steps, torch.float32) for steps in OLDER]
        self._node: tuple[str, torch.nn.Module] | None = None

    def node(self, name: str) -> torch.nn.Module:
        if self._node is None or self._node[0] != name:
            self._node = (name, self.load(name, STALE.get(name, 0), HONEST.get(name, torch.bfloat16)))
        return self._node[1]

    def load(self, name: str, steps: int, dtype: torch.dtype) -> torch.nn.Module:
        """Load weights `steps` old. The newest steps are the same for all, so one went through the other's weights."""
        model = AutoModelForCausalLM.from_pretrained(ASSETS / "policy", dtype=torch.float32).eval()
        with torch.no_grad():
            for step in range(steps):
                generator = torch.Generator().manual_seed(step)
                for tensor in model.parameters():
                    tensor += self._lr * torch.randn(tensor.shape, generator=generator).sign()
            for tensor in model.parameters() if name == "int8" else ():
                if tensor.dim() == 2:
                    scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
                    tensor.copy_((tensor / scale).round() * scale)
        return model if dtype == torch.float32 else model.bfloat16()


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


def generate(model: torch.nn.Module, prompts: np.ndarray, seeds: np.ndarray, tokens: int) -> tuple[np.ndarray, ...]:
    """prompts [B, P] -> tokens int64 [B, T] and logprobs float32 [B, T], one position after another with a cache."""
    cache, ids, drawn = DynamicCache(), torch.from_numpy(prompts), []
    for step in range(tokens):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        drawn.append(sample(logits, rows(seeds, np.full(len(seeds), prompts.shape[1] + step))))
        ids = torch.from_numpy(drawn[-1][0])[:, None]
    return tuple(np.stack(parts, axis=1) for parts in zip(*drawn, strict=True))


def score(model: torch.nn.Module, prompts: np.ndarray, seeds: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, ...]:
    """Misses and logprobs, each [B, T], of drawn tokens [B, T], all in one pass."""
    ids = torch.from_numpy(np.concatenate([prompts, drawn[:, :-1]], axis=1))
    logits = model(ids, use_cache=False, logits_to_keep=drawn.shape[1]).logits
    positions = np.tile(prompts.shape[1] + np.arange(drawn.shape[1]), len(drawn))
    scored = draw_misses(logits.flatten(0, 1), rows(np.repeat(seeds, drawn.shape[1]), positions), drawn.reshape(-1))
    return tuple(part.reshape(drawn.shape) for part in scored)


@torch.inference_mode()
def audited(models: Models, name: str, asked: list[list[int]], number: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return batch `number` of a node: CPU seconds of generation and of each pass of the audit, counts by answer."""
    random = np.random.default_rng([number, *name.encode()])
    length = SHORTEST_PROMPT + number % PROMPT_LENGTHS
    prompts = np.array([ids[-length:] for ids in asked])
    seeds = random.integers(0, 2**53, len(prompts)).astype(np.uint64)
    model, clock = models.node(name), [time.process_time()]
    drawn, claimed = generate(model, prompts, seeds, args.tokens)
    clock.append(time.process_time())
    misses, own = score(models.right, prompts, seeds, drawn)
    clock.append(time.process_time())
    older = [score(model, prompts, seeds, drawn) for model in models.older]
    clock.append(time.process_time())
    if name == "lying":
        claimed = np.minimum(claimed + random.normal(0, 0.02, claimed.shape), 0).astype(np.float32)
    ends = np.where((drawn == EOS).any(1), (drawn == EOS).argmax(1) + 1, args.tokens)
    answers = []
    for row, end in enumerate(ends):
        request = AuditRequest(
            audit=row,
            prompt_ids=pack_ints(prompts[row]),
            token_ids=pack_ints(drawn[row, :end]),
            logprobs=pack_floats(claimed[row, :end]),
            version_spans=[VersionSpan(0, int(end), 1)],
            finish_reason="stop" if drawn[row, end - 1] == EOS else "length",
            sampling=Sampling(max_tokens=args.tokens, seed=int(seeds[row])),
            tolerance=1e-4 if name == "honest32" else args.tolerance,
        )
        audit = OpenAudit(request, older=0)
        audit.misses[:], audit.logprobs[:] = misses[row, :end], own[row, :end]
        counts = []
        for scored in older:
            audit.older_scores = scored[0][row, :end], scored[1][row, :end]
            found = judge(audit, int(end) if request.finish_reason == "stop" else None)
            counts += [*found.by_logprob, *found.by_draw]
        answers.append([length * len(prompts) + row, int(end), len(found.wrong), int(found.fault is not None), *counts])
    gaps = np.abs(claimed - own)[np.arange(args.tokens) < ends[:, None]]
    seconds = np.diff(clock).round(3).tolist()
    return {"node": name, "number": number, "seconds": seconds, "gap": float(gaps.mean()), "answers": answers}


# -- the tables ----------------------------------------------------------------------------------------------------


def tokens_until_caught(answers: np.ndarray, which: int) -> tuple[float, float]:
    """Meet answers [A, 12] compared with OLDER[which]: tokens until the node is quarantined, infinite when it is not.

    Returns the most evidence for old weights as well, in nats.
    """
    trust, total, most = NodeTrust(), 0, 0.0
    for prompt, tokens, wrong, fault, *counts in answers.tolist():
        nearer, compared, old_draws, told_apart = counts[4 * which : 4 * which + 4]
        verdict = AuditVerdict(
            audit=0,
            tokens=tokens,
            wrong=list(range(wrong)),
            fault="" if fault else None,
            gap_mean=0.0,
            gap_max=0.0,
            seconds=0.0,
            by_logprob=(nearer, compared),
            by_draw=(old_draws, told_apart),
        )
        total += tokens
        caught = trust.note(verdict, prompt)
        most = max(most, *trust.old_evidence)
        if caught is not None:
            return total, most
    return float("inf"), most


def upper(count: int, of: int) -> float:
    """Return the upper end of the exact 95 % interval of a share."""
    return 1.0 if count == of else float(beta.ppf(0.975, count + 1, of - count))


def tables(lines: list[dict[str, Any]], args: argparse.Namespace) -> bool:
    """Print what there is. Returns whether no honest node was quarantined."""
    print(f"{'node':<9}{'answers':>8}{'tokens':>8}{'mean gap':>9}{'refused':>8}{'up to':>9}{'audit/gen':>10}"
          f"{'older':>7}{'nearer':>8}{'draws':>9}{'nats':>6}{'caught':>9}{'median':>8}{'p90':>8}")  # fmt: skip
    fine = True
    for name in (*HONEST, *STALE, "int8"):
        own = [line for line in lines if line["node"] == name]
        if not own:
            continue
        answers = np.concatenate([line["answers"] for line in own])
        refused = int((answers[:, 2:4] > 0).any(1).sum())
        spent = np.sum([line["seconds"] for line in own], axis=0)
        print(f"{name:<9}{len(answers):>8}{answers[:, 1].sum():>8}{np.mean([line['gap'] for line in own]):>9.1e}"
              f"{refused:>8}{upper(refused, len(answers)):>9.1e}{spent[1] / spent[0]:>10.2f}", end="")  # fmt: skip
        for which, steps in enumerate(OLDER):
            if name in HONEST:
                lives = [answers[first : first + args.life] for first in range(0, len(answers), args.life)]
            else:
                lives = [np.random.default_rng(life).permutation(answers) for life in range(args.lives)]
            met = [tokens_until_caught(life, which) for life in lives]
            times = [tokens for tokens, _ in met]
            caught = int(np.isfinite(times).sum())
            fine &= caught == 0 or name not in HONEST
            nearer, compared, draws, apart = answers[:, 4 + 4 * which : 8 + 4 * which].sum(0)
            print(f"{'' if which == 0 else ' ' * 61}{steps:>7}{nearer / max(1, compared):>8.3f}{draws:>5}/{apart:<3}"
                  f"{max(most for _, most in met):>6.1f}{caught:>5}/{len(lives):<3}{np.median(times):>8.0f}"
                  f"{np.quantile(times, 0.9, method='higher'):>8.0f}")  # fmt: skip
    return fine


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    start, made = time.monotonic(), 0
    lines = [json.loads(line) for line in args.state.read_text().splitlines()] if args.state.exists() else []
    if args.seconds > 0:
        models, asked = Models(args.lr), conversations()
        for name in args.nodes:
            done = [len(line["answers"]) for line in lines if line["node"] == name]
            wanted, number = (args.answers if name in HONEST else args.pool) - sum(done), len(done)
            while wanted > 0 and time.monotonic() - start < args.seconds:
                lines.append(audited(models, name, asked, number, args))
                with args.state.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
                number, made, wanted = number + 1, made + 1, wanted - len(asked)
    print(f"{made} batches in {time.monotonic() - start:.0f} s, {time.process_time():.0f} CPU s in all")
    if tables(lines, args):
        return 0
    print("FAILED: an honest node was quarantined", file=sys.stderr)
    return 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="file that results are added to")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no batch after so long")
    parser.add_argument("--nodes", nargs="+", default=[*HONEST, *STALE, "int8"], help="which ones, in order")
    parser.add_argument("--answers", type=int, default=100_000, help="of each honest node")
    parser.add_argument("--pool", type=int, default=1024, help="answers of each other node")
    parser.add_argument("--tokens", type=int, default=8, help="longest answer")
    parser.add_argument("--life", type=int, default=10_000, help="answers of an honest node's life")
    parser.add_argument("--lives", type=int, default=20, help="orders in which the others' answers are met")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of all but honest32")
    parser.add_argument("--lr", type=float, default=2e-4, help="how far a step moves each weight")
    parser.add_argument("--threads", type=int, default=1)
    raise SystemExit(main(parser.parse_args()))
