"""The errors that composer-prime raises on purpose, each also the fitting standard-library error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ComposerError(Exception):
    """Root of every error that composer-prime raises on purpose."""


class ConfigError(ComposerError, ValueError):
    """A configuration that cannot work. The message names the values in conflict and the remedy."""


class ModelNotFoundError(ConfigError):
    """A model folder is missing or lacks a file that a Hugging Face model needs."""


class PortInUseError(ConfigError, OSError):
    """Another process holds the address that this role should bind."""


class NotLiveError(ConfigError):
    """A command needs a live run, and no orchestrator of that run answers on this machine."""


class InviteError(ConfigError):
    """An invite that admits nobody: cut short, expired, used up, of another run or release. Or its node was revoked."""


class LedgerError(ConfigError):
    """A line of a costs.jsonl lacks what has to be summed. The message names file, line and what is wrong."""


class UnwritableError(ConfigError, OSError):
    """A file cannot be opened for writing. The message names it and the reason."""


class WireError(ComposerError, ValueError):
    """A message that cannot be decoded or does not belong to this conversation."""


class ChecksumError(WireError):
    """A payload differs from the checksum in its header."""


class RunMismatchError(WireError):
    """A payload of another run, step, rank layout or policy-version range."""


class WeightError(ComposerError, RuntimeError):
    """Weights that must not be loaded."""


class SignatureError(WeightError):
    """A weight manifest whose signature is not the run's trainer's."""


class CorruptWeightsError(WeightError):
    """A weight chunk or tensor that is cut short or differs from its hash."""


class CanaryError(WeightError):
    """After a swap the engine does not reproduce the manifest's canary logprobs."""


class MisfitError(WeightError):
    """Weights whose names or shapes are not the model's. They were refused before anything changed."""


class EngineError(ComposerError, RuntimeError):
    """An inference engine cannot serve."""


class LostWeightsError(EngineError):
    """After a failed swap the old weights could not be loaded again: nothing may be sampled any more."""


class BadRequestError(EngineError, ValueError):
    """A request that no engine could serve, so another node would not help."""


class RequestError(ComposerError, ValueError):
    """An HTTP request that the gateway does not serve. The message names the value and the remedy."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class RolloutError(ComposerError, RuntimeError):
    """A rollout failed. The orchestrator records it and retries; the failure never becomes a zero reward."""


class EnvironmentWorkerError(RolloutError):
    """A source's worker process failed more often than its restart limit allows."""


class SandboxError(ComposerError, RuntimeError):
    """A sandbox cannot be opened on this machine, or ended. The message names the remedy."""


class EndpointError(ComposerError, ConnectionError):
    """A model endpoint outside this run (a judge, a hint writer) gave no usable answer."""


class BudgetError(EndpointError):
    """A call was not made, because its worst case does not fit into the rest of the endpoint's budget."""


class TeacherError(EndpointError):
    """A teacher gave no usable answer after all retries, or may not judge a trace. Replay records it and continues."""


class CapError(BudgetError):
    """A teacher call was not made, because it would pass the cap of cost."""


class CheckpointError(ComposerError, RuntimeError):
    """A checkpoint could not be written whole, or cannot be read."""


class NonFiniteError(ComposerError, ArithmeticError):
    """NaN or infinity where training needs finite numbers."""


class NonFiniteStepError(NonFiniteError):
    """A step whose loss or gradient is not finite; nothing was changed. `samples` are those to blame, of all ranks."""

    def __init__(self, message: str, samples: list[str]):
        super().__init__(message)
        self.samples = samples


class RoleFailedError(ComposerError, RuntimeError):
    """A process of the run ended with an error."""


class PullRefusedError(ComposerError, PermissionError):
    """The gateway gives this node no more weights for now. The message has the allowance and the remedy."""


class DeadlineError(ComposerError, TimeoutError):
    """A wait went past its deadline. The message names what was waited for and since when."""


class LostRunError(DeadlineError):
    """A node did not reach its run in time."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the first ComposerError of an exception group by itself: it is what the tasks of a TaskGroup ended by."""
    try:
        yield
    except ExceptionGroup as group:
        found: BaseException | None = group.subgroup(ComposerError)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if found is None:
            raise
        raise found from group
