"""A control arm for SDPO: every error turn gets a hint that belongs elsewhere.

    trainer @ configs/a2.toml @ wrong_hints.toml                           with, in wrong_hints.toml:

    [run]
    import_from = ["examples"]
    [orchestrator.hints]
    layers = [{ name = "wrong_hints:WrongHints", settings = { mode = "other_error" } }]

If the arm with wrong hints gains as much as the one with right hints, it is not what the hints say that helps. RLCSD
(arXiv 2606.11709) contrasts the two in its loss.
"""

from __future__ import annotations

import random
from collections import deque

from composer_prime.errors import ConfigError
from orchestrator.hints.generate import HintRequest, Templates
from orchestrator.rollouts.groups import derive_seed

MODES = ("other_error", "other_episode")
_REMEMBERED = 256


class WrongHints:
    """Writes the template's hint for another kind of error (`other_error`), or for another task (`other_episode`).

    It draws from the newest right hints, so the first error turns of a run get none.
    """

    def __init__(self, mode: str = "other_error", seed: int = 0) -> None:
        """Raises ConfigError for another mode."""
        if mode not in MODES:
            raise ConfigError(f"wrong_hints: mode is {mode!r}; expected {' or '.join(MODES)}")
        self._mode = mode
        self._templates = Templates.load()
        self._seed = seed
        self._right: deque[tuple[str, str, str]] = deque(maxlen=_REMEMBERED)

    async def __call__(self, request: HintRequest) -> str | None:
        """Return a wrong hint for the turn, and remember its right one for other turns."""
        kind, task = request.error.kind, request.rollout.task_id
        right = await self._templates.hint(request)
        others = [
            text
            for other_kind, other_task, text in self._right
            if text != right and (other_kind != kind if self._mode == "other_error" else other_task != task)
        ]
        if right is not None:
            self._right.append((kind, task, right))
        seed = derive_seed(self._seed, request.rollout.rollout_id, request.error.turn)
        return random.Random(seed).choice(others) if others else None
