"""A task set without tools, for the tests of the tool loop."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        yield SumTask(SumData(system_prompt="Answer with a number.", prompt="1 + 1?", answer="2"), self.config.task)
