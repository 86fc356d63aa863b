"""The teachers of a configuration: who may judge which trace, in which order."""

from __future__ import annotations

from collections.abc import Mapping

from composer_prime.config.teachers import TeachersConfig
from composer_prime.errors import TeacherError
from composer_prime.llm.budget import Budget
from composer_prime.llm.cache import AnswerCache, Question
from composer_prime.llm.families import UNKNOWN, family_named
from composer_prime.llm.prices import price_of
from composer_prime.model_source import resolve_model
from composer_prime.traces.replay.teachers.teacher import NotAskedError, Teacher, TeacherAnswer
from composer_prime.traces.state import Message, TraceState

_TIERS = ("cheap", "mid", "frontier")


def check_pool(config: TeachersConfig) -> None:
    """Raises ConfigError for an unknown price, a key that is not set or no model there: before anything is loaded."""
    for teacher in config.teacher:
        price_of(teacher)
        if teacher.local:
            resolve_model(teacher.model)
        elif not config.cache_only:
            teacher.api_key()


class TeacherPool:
    def __init__(self, config: TeachersConfig, budget: Budget, addresses: Mapping[str, str] | None = None) -> None:
        """`addresses`: where each local model is served. Raises ConfigError (unknown price, no key)."""
        cache = AnswerCache(config.cache_dir.expanduser())
        self.config = config
        self.teachers = [
            Teacher(each, config, price_of(each), budget, cache, base_url=(addresses or {}).get(each.model))
            for each in config.teacher
        ]
        self.teachers.sort(key=lambda teacher: (_TIERS.index(teacher.config.tier), teacher.price.output_usd))

    def family_of(self, state: TraceState) -> str:
        """The family that wrote the state, `assume_family` where the trace does not say."""
        known = family_named(state.source_family)
        return (self.config.assume_family or UNKNOWN) if known == UNKNOWN else known

    def voters(self, state: TraceState) -> list[Teacher]:
        """Who may judge this state, cheapest first, one of each family before a second of any.

        Raises TeacherError when fewer than two families remain, or the state's own is unknown.
        """
        own = self.family_of(state)
        if own == UNKNOWN:
            raise TeacherError(
                "it is not known which model wrote the trace, so no family can be left out: ingest it with --model or "
                "--family, or set teachers.assume_family"
            )
        allowed = [teacher for teacher in self.teachers if teacher.family != own]
        families = {teacher.family for teacher in allowed}
        if len(families) < 2:
            names = ", ".join(sorted(families)) or "none"
            raise TeacherError(
                f"the trace was written by family {own!r}, which leaves {names} to judge it: two families are needed; "
                "add teachers of others"
            )
        rank: dict[str, int] = {}
        ranked = []
        for teacher in allowed:
            rank[teacher.family] = rank.get(teacher.family, -1) + 1
            ranked.append((rank[teacher.family], teacher))
        return [teacher for _, teacher in sorted(ranked, key=lambda entry: entry[0])]

    async def ask(self, teacher: Teacher, state: TraceState) -> TeacherAnswer:
        """Raises NoAnswerError; NotAskedError, also where the teacher is of the state's own family; CapError."""
        if teacher.family == self.family_of(state):
            raise NotAskedError(
                f"{teacher.name} is of family {teacher.family!r}, which wrote the trace: it has no vote"
            )
        return await teacher.ask(self.question(teacher, state), trace=state.trace_id, state=state.state_id)

    def question(self, teacher: Teacher, state: TraceState) -> Question:
        return teacher.question(self._prompt(state), state.tools)

    def price_usd(self, teacher: Teacher, state: TraceState) -> float:
        """What this teacher's vote will cost now, about; nothing when its answer is in the cache."""
        return 0.0 if teacher.knows(self.question(teacher, state)) else self.expected_usd(teacher, state)

    def expected_usd(self, teacher: Teacher, state: TraceState) -> float:
        """What this teacher's vote will cost, about, were it not in the cache."""
        return teacher.expected_usd(self.question(teacher, state))

    async def close(self) -> None:
        for teacher in self.teachers:
            await teacher.close()

    def _prompt(self, state: TraceState) -> list[Message]:
        if not self.config.system_prompt or (state.messages and state.messages[0]["role"] == "system"):
            return state.messages
        return [{"role": "system", "content": self.config.system_prompt}, *state.messages]
