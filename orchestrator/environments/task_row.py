"""What our task sets share: the base of their rows, and tasks of one answer. Importing this imports verifiers."""

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.utils.artifacts import MAX_ARTIFACT_BYTES

from orchestrator.environments.answers import AnswerPlace, find_answer


class TaskRow(vf.TaskData):
    """verifiers' row of a task, for type checkers: they take a field for required whose default is positional."""

    artifact_max_bytes: int = Field(default=MAX_ARTIFACT_BYTES, gt=0)


class OneAnswer:
    """Mixed into a `vf.Task`: one model turn, whose reply holds the answer at `answer_in`."""

    answer_in: AnswerPlace

    def answer(self, trace: vf.Trace) -> str | None:
        return find_answer(trace.last_reply, self.answer_in)

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.metric
    async def has_answer(self, trace: vf.Trace) -> float:
        return float(self.answer(trace) is not None)
