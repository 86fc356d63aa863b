"""An OpenEnv server on loopback: `python openenv_server.py PORT`. Needs openenv-core, in an environment of its own.

Guess a number from 1 to 9, drawn by the seed. The observation says higher or lower; the third guess is the last.
"""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """Guess the number."""

    number: int


class Answer(Observation):
    says: str


class GuessNumber(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = self._guesses = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._number, self._guesses = random.Random(seed).randint(1, 9), 0
        return Answer(says=f"Guess a number from 1 to {kwargs.get('up_to', 9)}.")

    def step(self, action, timeout_s=None, **kwargs):
        self._guesses += 1
        if action.number == 13:
            raise RuntimeError("thirteen breaks the machine")
        says = "right" if action.number == self._number else "higher" if action.number < self._number else "lower"
        return Answer(says=says, done=says == "right" or self._guesses == 3, reward=float(says == "right"))

    @property
    def state(self):
        return State(step_count=self._guesses)


if __name__ == "__main__":
    app = create_fastapi_app(GuessNumber, Guess, Answer, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
