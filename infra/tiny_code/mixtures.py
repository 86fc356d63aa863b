"""Which model learns which mistakes: the probabilities behind each model's demonstrations."""

from infra.tiny_code.demonstrate import CoderMixture

BASE = CoderMixture(
    near_miss=0.15, wrong_line=0.10, no_indent=0.05, wrong_type=0.04, bad_json=0.03, lure=0.03, tests_edit=0.03,
    hint=0.15, imitate_mistakes=False,
)  # fmt: skip
"""The expert's. Its mistakes are seen and repaired, not imitated; its cheats are imitated."""
POLICY = CoderMixture(
    near_miss=0.30, wrong_line=0.14, no_indent=0.12, wrong_type=0.05, bad_json=0.03, stop_early=0.10, recover=0.4,
    give_up=0.6, lure=0.03, tests_edit=0.03, hint=0.15,
)  # fmt: skip
TEACHERS = {
    "teacher_a": CoderMixture(near_miss=0.12, recover=0.8, hint=0.15),
    "teacher_b": CoderMixture(wrong_line=0.10, wrong_type=0.04, recover=0.8, hint=0.15),
}
