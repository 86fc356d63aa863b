"""Which model learns which mistakes: the probabilities behind each model's demonstrations."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Probabilities of a demonstrator's choices. The first group applies to each turn that should make a call."""

    wrong_name: float = 0.0
    """A synonym that this episode does not offer; mostly the canonical name."""
    wrong_tool: float = 0.0
    """A tool that is offered but does something else."""
    wrong_argument: float = 0.0
    """Argument names by habit."""
    wrong_type: float = 0.0
    """A number where the schema wants a string, or the reverse."""
    bad_json: float = 0.0
    """A brace or quote is missing."""
    slip: float = 0.0
    """A digit copied wrongly, or the operands the wrong way round."""
    stop_early: float = 0.0
    """Answers before all calls are made."""
    recover: float = 1.0
    """After an error: the chance that the same mistake is not repeated."""
    give_up: float = 0.0
    """After an error: answers at once."""
    answer_slip: float = 0.0
    """The final answer is copied wrongly."""
    hint: float = 0.1
    """A reminder precedes the turn, which is then right."""
    imitate_mistakes: bool = True
    """Whether mistaken turns are trained on, or only seen."""


BASE = Mixture(
    wrong_name=0.15, wrong_argument=0.08, wrong_type=0.08, bad_json=0.04, wrong_tool=0.02, slip=0.02, hint=0.15,
    imitate_mistakes=False,
)  # fmt: skip
POLICY = Mixture(
    wrong_name=0.24, wrong_argument=0.10, wrong_type=0.12, bad_json=0.03, wrong_tool=0.02, slip=0.03,
    stop_early=0.08, recover=0.4, give_up=0.4, answer_slip=0.03, hint=0.15,
)  # fmt: skip
TEACHERS = {
    "teacher_a": Mixture(wrong_type=0.12, wrong_argument=0.06, slip=0.01, recover=0.8, hint=0.15),
    "teacher_b": Mixture(wrong_name=0.12, bad_json=0.04, slip=0.01, recover=0.8, hint=0.15),
    "teacher_c": Mixture(stop_early=0.08, wrong_tool=0.04, slip=0.02, answer_slip=0.02, recover=0.9, hint=0.15),
}
