"""The settings of published recipes give the loss and gradient that the recipe's own code gives on one small example.

The figures are those of lasgroup/SDPO at 0e6d5106, siyan-zhao/OPSD at 590ec26c and (with clip) c181e5bf, and
Gen-Verse/OpenClaw-RL at 0d034dd5, in float64; SRPO's follow the equations of arXiv 2604.02288. Two samples of 4 and 2
tokens, each one turn; 7 words. A figure is the loss, 5 entries of its gradient with respect to the student's logits,
and the sum of all entries times sin(1 + 7 i + j).
"""

import pytest
import torch

from composer_prime.channels.policy import PolicyTokens
from composer_prime.channels.sdpo import SdpoTokens, divergence
from composer_prime.channels.term import total_loss
from composer_prime.config.channels import ChannelsConfig
from composer_prime.wire.types import StepTotals

TOKEN = torch.arange(6, dtype=torch.float64)[:, None]
WORD = torch.arange(7, dtype=torch.float64)
STUDENT, TEACHER = 2 * torch.sin(0.7 * TOKEN + 1.3 * WORD), 2 * torch.cos(0.5 * TOKEN + 1.1 * WORD)
SAMPLED = (3 * torch.arange(6) + 1) % 7
SAMPLE = torch.tensor([0, 0, 0, 0, 1, 1])
GAP = torch.sin(1.7 * TOKEN[:, 0] + 0.3)
ALONE, TOP = {"weight": 0}, {"kind": "top_k", "top_k": 3}
EMA = {"kind": "ema", "rate": 0.05}
SDPO = {"policy": {"objective": "grpo", **ALONE}, "sdpo": {**TOP, "teacher": EMA}}
OPSD = {"policy": {"objective": "dapo", **ALONE}, "sdpo": {"teacher": {"kind": "frozen"}}}
LATER = {**OPSD, "sdpo": {"teacher": {"kind": "frozen"}, "beta": 0, "clip": 0.05}}
SRPO = {
    "policy": {"objective": "dapo", "advantage_scaling": "none", "correction": "tis"},
    "sdpo": {**TOP, "teacher": EMA, "route": "failed"},
}
OPENCLAW = {"objective": "grpo", "advantage_scaling": "none", "clip_high": 0.28}
SAMPLED_KL = {"kind": "sampled", "beta": 1, "teacher": {"kind": "frozen"}}
RECIPES = {
    "SDPO": (SDPO, {}, [0.05761572, -0.00419980, -0.00027795, -0.00117921, -0.00093207, -0.00000074, -0.01471700]),
    "SDPO, one sample has no teacher": (SDPO, {"hinted": [1]},
        [0.01394934, 0.0, 0.0, 0.0, -0.00093207, -0.00000074, -0.01663580]),
    "SDPO on code": ({**SDPO, "sdpo": {**TOP, "beta": 1}}, {},
        [0.28074964, -0.01596670, -0.00139459, -0.00695098, -0.00412437, -0.00003916, -0.13660450]),
    "OPSD": (OPSD, {"gap": 0, "temperature": 1.1},
        [0.05222523, -0.00580396, -0.00020909, -0.00293265, -0.00047239, 0.00005811, -0.01609911]),
    "OPSD with a clip": (LATER, {"gap": 0, "temperature": 1.1},
        [0.01702836, 0.00416198, -0.00173794, 0.00659985, -0.00323401, -0.00069483, -0.00237304]),
    "OPSD with a clip, a sample a micro-batch": ({**LATER, "policy": {"objective": "bnpo", **ALONE}},
        {"gap": 0, "micro_batches": [[0], [1]]},
        [0.02069352, 0.00292838, -0.00110908, 0.00473911, -0.00441503, -0.00087916, -0.02241954]),
    "SRPO": (SRPO, {"hinted": [1], "advantages": [0.75, 0.0]},
        [-0.53998313, 0.00839794, 0.00163479, 0.01461867, -0.00062138, -0.00000049, 0.24184908]),
    "OpenClaw": ({"policy": {**OPENCLAW, **ALONE}, "sdpo": SAMPLED_KL}, {"gap": 0},
        [None, -0.00687405, 0.00098333, 0.02914527, 0.00188683, 0.00066806, 0.42482335]),
    "OpenClaw beside a policy loss": ({"policy": OPENCLAW, "sdpo": SAMPLED_KL},
        {"gap": 0, "hinted": [1], "advantages": [1.0, -1.0]},
        [None, 0.00624928, 0.00081739, 0.03166032, -0.00212571, -0.00252633, -0.04804742]),
}  # fmt: skip


def loss_of(settings, logits, *, hinted=(0, 1), advantages=(0.0, 0.0), gap=1, temperature=1.0, micro_batches=((0, 1),)):
    """Return the loss of a step over its micro-batches, each a list of samples."""
    channels = ChannelsConfig(**{**settings, "sdpo": {"weight": 1.0, **settings["sdpo"]}})
    totals = StepTotals(samples=2, tokens=6, micro_batches=len(micro_batches))
    total = torch.zeros((), dtype=torch.float64)
    for samples in micro_batches:
        of_row = torch.isin(SAMPLE, torch.tensor(samples))
        taught = of_row & torch.isin(SAMPLE, torch.tensor(hinted))
        student, teacher = logits / temperature, TEACHER / temperature
        logprobs = student.log_softmax(-1).gather(-1, SAMPLED[:, None])[:, 0]
        sampler = logprobs.detach() - gap * GAP
        policy = PolicyTokens(
            logprobs_T=logprobs[of_row],
            sampler_logprobs_T=sampler[of_row],
            advantages_T=torch.tensor(advantages, dtype=torch.float64)[SAMPLE[of_row]],
            entropy_T=torch.zeros(int(of_row.sum()), dtype=torch.float64),
            sequence_T=SAMPLE[of_row] - samples[0],
            sequences=len(samples),
        )
        sdpo = SdpoTokens(
            divergence_D=divergence(student[taught], teacher[taught], channels.sdpo, SAMPLED[taught]),
            logprobs_D=logprobs[taught],
            sampler_logprobs_D=sampler[taught],
            weight_D=torch.ones(int(taught.sum()), dtype=torch.float64),
            turn_D=SAMPLE[taught] - SAMPLE[taught].min(),
            kind_D=SAMPLE[taught],
            turns=len(set(SAMPLE[taught].tolist())),
            row_tokens=int(of_row.sum()),
            sample_tokens_D=torch.tensor([4, 2])[SAMPLE[taught]],
            teacher_entropy_D=torch.zeros(int(taught.sum()), dtype=torch.float64),
            teacher_logprobs_D=torch.zeros(int(taught.sum()), dtype=torch.float64),
        )
        total = total + total_loss(channels.terms(1), {"policy": policy, "sdpo": sdpo}, totals).total
    return total


# A sampled recipe reports another value than its code does (departure 2), so its gradient alone is compared.
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_its_source_s_loss(name):
    settings, step, expected = RECIPES[name]
    logits = STUDENT.clone().requires_grad_()
    loss = loss_of(settings, logits, **step)
    (gradient,) = torch.autograd.grad(loss, logits)
    entries = [gradient[at].item() for at in ((0, 0), (1, 3), (3, 5), (4, 2), (5, 6))]
    found = [loss.item(), *entries, (gradient * torch.sin(1 + 7 * TOKEN + WORD)).sum().item()]
    pairs = [(mine, theirs) for mine, theirs in zip(found, expected, strict=True) if theirs is not None]
    assert all(abs(mine - theirs) < 2e-8 for mine, theirs in pairs), found


# Entries above the clip have no gradient of their own: the rest gives S_j sum T_kept - T_j for each kept j.
def test_a_clipped_word_pushes_the_student_away():
    logits = STUDENT.clone().requires_grad_()
    loss = loss_of(LATER, logits, gap=0) * 6
    (gradient,) = torch.autograd.grad(loss, logits)
    student, teacher = STUDENT.softmax(-1), TEACHER.softmax(-1)
    kept = teacher * (teacher.log() - student.log()) <= 0.05
    by_hand = student * (teacher * kept).sum(-1, keepdim=True) - teacher * kept
    assert torch.allclose(gradient, by_hand, atol=1e-12)
    assert (gradient[~kept] > 0).all() and not kept.all()
