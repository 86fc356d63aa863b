"""The votes on one state: which teacher to ask next, and which pairs the answers give.

1. A majority (more than N/2 of the planned voters, of at least two families, by canonical form) beats the student,
   where they differ.
2. A student that the majority agrees with beats each minority answer.
3. No majority gives no pair. Nor does one whose action cannot run in the state.

epsilon, the probability that a label is wrong: 1 - (k + 1/2) / (n + 1) with k of n votes for the chosen side, at most
1/2. These rules and the replay-DPO loss are this project's own.

Two actions are the same when they have one canonical form:

    shell    ("shell", tool, tokens, sorted JSON of the other arguments)
    call     ("call", name, sorted JSON arguments, paths normalized)
    prose    ("prose",): any text without an action, and the call that ends a trace

Text beside a call does not count. A call in the text is an action only where the agent has no tools; it is then written
as <function=NAME><parameter=KEY>value</parameter></function> (xml) or as a command in a fenced block (fence).

Two different actions of one form would make a false agreement; two equal actions of different forms only cost a pair.
So every difference counts that may be more than cosmetic: the order of calls, an argument at its default.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from composer_prime.data.pairs import Pair, PairState
from composer_prime.llm.cache import CachedAnswer
from composer_prime.llm.client import NoAnswerError
from composer_prime.traces.records import Message, TraceState, VoteRecord, digest
from composer_prime.traces.replay.teacher_pool import Teacher

Canonical = tuple[Any, ...]
PROSE = ("prose",)
_SHELLS = {"bash", "shell", "terminal", "execute_bash", "run", "run_command", "cmd_run", "local_shell", "execute"}
_COMMANDS = ("command", "cmd", "script")
_ENDS = {"finish", "submit"}
_LAST_WORDS = {"message", "outputs", "final_thought"}
_COSMETIC = {"summary", "security_risk", "explanation", "thought"}
"""Arguments that describe an action and do not change it."""
_BESIDE_COMMANDS = _COSMETIC | {
    "description", "reason", "timeout", "timeout_ms", "timeout_s", "timeout_sec", "timeout_seconds",
}  # fmt: skip
_PATH = re.compile(r"(?i)(?:^|_)(?:path|file|filename|filepath|dir|directory|cwd)s?$|file_?(?:path|name)")

BROKEN = re.compile(r"<tool_call>|<function=")
_FENCE = re.compile(r"```(?:mswea_bash_command|bash|sh|shell)\s*\n(.*?)```", re.DOTALL)
_BARE_FENCE = re.compile(r"```\s*\n(.*?)```\s*$", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\s]{1,200})>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]{1,200})>")
_PLAIN = r"[\w@%+:,./-]"
"""Characters of a command that mean the same quoted or not."""
_TOKEN = re.compile(
    r"(?P<blank>[ \t](?:[ \t]|\\\n)*)"
    r"|(?P<operator>(?<![^ \t])2>&1(?=[\s;|]|\Z)|&&|\|\||>>|[;|>\n])"
    rf"|(?P<word>(?:{_PLAIN}+|=|'[^']*'|\"[^\"\\$`]*\")+)"
)
_PIECE = re.compile(r"'([^']*)'|\"([^\"]*)\"|([^'\"]+)")
_RESERVED = re.compile(r"if|then|elif|else|fi|for|select|in|while|until|do|done|case|esac|function|time|coproc")


def canonical(action: Message, tools: list[dict[str, Any]]) -> Canonical | None:
    """Return the canonical form of an assistant message in a state, if any."""
    calls = action.get("tool_calls") or []
    if calls:
        return _turn([_call(call["function"]) for call in calls], "actions")
    text = (action.get("content") or "").strip()
    if not text:
        return None
    if tools:
        return ("broken", text) if BROKEN.search(text) else PROSE
    acts = actions_in_text(text)
    if acts is None:
        return PROSE
    way, calls = acts
    forms = [_form(name, arguments) for name, arguments in calls]
    return _turn(forms, "xml" if way == "xml" else "actions") if forms else ("broken", text)


def _turn(forms: list[Canonical], kind: str) -> Canonical:
    return PROSE if set(forms) == {PROSE} else (kind, *forms)


def _call(function: dict[str, Any]) -> Canonical:
    name, raw = function["name"], function["arguments"]
    try:
        arguments = json.loads(raw) if raw.strip() else {}
        _json(arguments).encode()  # half of a surrogate pair is not valid text
        form = _form(name, arguments) if isinstance(arguments, dict) else None
    except (ValueError, RecursionError):
        form = None
    return form or ("broken", name, raw)


def _form(name: str, arguments: dict[str, Any]) -> Canonical:
    tool = name.lower()
    if tool in _ENDS:
        kept = _kept(arguments, _COSMETIC | _LAST_WORDS)
        # Prose, unless it says more than that the task is done
        done = ("{}", '{"task_completed": "true"}', '{"task_completed": true}')
        return PROSE if kept in done else ("call", tool, kept)
    key = next((key for key in _COMMANDS if isinstance(arguments.get(key), str)), None)
    if tool in _SHELLS and key is not None:
        off = {other for other, value in arguments.items() if value in (False, "false")}
        return ("shell", tool, shell(arguments[key]), _kept(arguments, _BESIDE_COMMANDS | off | {key}))
    return ("call", name, _kept(arguments, _COSMETIC))


def _kept(arguments: dict[str, Any], without: set[str]) -> str:
    return _json(
        {key: _plain(key, value) for key, value in arguments.items() if value is not None and key not in without}
    )


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _PATH.search(key) and "://" not in value:
        return posixpath.normpath(value.strip()) if value.strip() else ""
    return value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def shell(command: str) -> tuple[str | tuple[str, str], ...]:
    """Return the tokens of a command: equal tokens do the same, whatever the spaces and quotes.

    A command with more than words and operators (an expansion, a here-document ...) is one token, as written.
    """
    tokens: list[str] = []
    at, touching = 0, False
    while at < len(command):
        match = _TOKEN.match(command, at)
        if match is None or (touching and match["word"]):
            return (("unread", command),)
        at, touching = match.end(), match["word"] is not None
        if touching and match[0].isdigit() and command.startswith(">", at):  # a descriptor
            return (("unread", command),)
        if touching:
            tokens.append(_word(match[0]))
        elif match["operator"]:
            tokens.append(match[0])
    kept = [token for token, before in zip(tokens, ["\n", *tokens], strict=False) if not token == before == "\n"]
    return tuple(kept[:-1] if kept[-1:] == ["\n"] else kept)


def _word(written: str) -> str:
    """Return a word, quoted in one way; an assignment or a reserved word as written."""
    pieces = _PIECE.findall(written)
    value = "".join(first or second or bare for first, second, bare in pieces)
    if not written.startswith("-") and any("=" in bare for _, _, bare in pieces):
        return written
    if value != written and _RESERVED.fullmatch(value):
        return written
    return value if re.fullmatch(f"{_PLAIN}+", value) else "'" + value.replace("'", "'\\''") + "'"


TextActions = tuple[Literal["xml", "fence", "broken"], list[tuple[str, dict[str, str]]]]
"""How a text writes actions, and (name, arguments) of each, a command as a call of bash; none if broken."""


def actions_in_text(text: str) -> TextActions | None:
    """Return a text's actions, if any. A block before a function is an example, one in it a value."""
    if "<function=" in _FENCE.sub("\n", text):
        calls = _functions(text)
        return ("broken", []) if calls is None else ("xml", calls)
    fenced = _FENCE.findall(text) or _BARE_FENCE.findall(text)
    if fenced:
        return "fence", [("bash", {"command": command}) for command in fenced]
    return ("broken", []) if BROKEN.search(text) else None


def way_of(messages: list[Message]) -> str | None:
    """Return how an agent last wrote an action in its text: xml or fence."""
    for message in reversed(messages):
        acts = actions_in_text(message.get("content") or "") if message["role"] == "assistant" else None
        if acts is not None and acts[0] != "broken":
            return acts[0]
    return None


def _functions(text: str) -> list[tuple[str, dict[str, str]]] | None:
    _, *opened = _FUNCTION.split(text)
    calls = []
    for name, rest in zip(opened[::2], opened[1::2], strict=True):
        body, end, after = rest.partition("</function>")
        arguments = _arguments(body)
        if not end or arguments is None or "</function>" in after or "<function=" in rest:
            return None
        calls.append((name, arguments))
    return calls or None


def _arguments(body: str) -> dict[str, str] | None:
    before, *opened = _PARAMETER.split(body)
    arguments = {}
    for name, rest in zip(opened[::2], opened[1::2], strict=True):
        value, end, after = rest.partition("</parameter>")
        if not end or after.strip():
            return None
        # A line break at either end belongs to the tags.
        arguments[name] = value.removeprefix("\n").removesuffix("\n")
    return None if before.strip() else arguments


_MIN_CHARS = 24
"""Shorter answers count as this long, so that one more word does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One teacher's answer."""

    record: VoteRecord
    form: Canonical
    message: Message


@dataclass(slots=True, kw_only=True)
class Ballot:
    """The votes on one state while they come in."""

    state: TraceState
    student: Canonical
    planned: int
    max_tokens: int
    votes: list[Vote] = field(default_factory=list)
    failed: int = 0
    """Calls without a vote; answers from the cache are none."""
    cached_usd: float = 0.0
    """What answers from the cache cost when first asked for."""
    without_vote: list[str] = field(default_factory=list)

    async def fill(self, voters: list[Teacher]) -> None:
        """Ask one teacher after another while the majority is open. Raises CapError."""
        for teacher in voters:
            if settled(self.votes, self.planned):
                break
            try:
                self._add(teacher, *await teacher.ask(self.state))
            except NoAnswerError as error:
                self.failed += 1
                self.without_vote.append(str(error))

    def _add(self, teacher: Teacher, answer: CachedAnswer, key: str, cached: bool) -> None:
        """Add a teacher's vote, unless it is cut short, filtered or empty."""
        form, fault = canonical(answer.message, self.state.tools), None
        self.cached_usd += answer.cost_usd * cached
        if answer.finish_reason == "length":
            fault = f"was cut at teachers.max_tokens = {self.max_tokens}"
        elif answer.finish_reason == "content_filter":
            fault = "was filtered by its endpoint (finish_reason content_filter)"
        if form is None or fault is not None:
            self.failed += not cached
            self.without_vote.append(f"an answer of {teacher.name} {fault or 'is empty'}")
            return
        record = VoteRecord(
            teacher=teacher.name,
            family=teacher.family,
            form=digest(form),
            agrees=form == self.student,
            answer=key,
            cached=cached,
            cost_usd=0.0 if cached else answer.cost_usd,
            price_usd=answer.cost_usd,
        )
        self.votes.append(Vote(record=record, form=form, message=answer.message))

    def outcome(self) -> tuple[str, str | None]:
        """Return the outcome as in StateRecord, and the reason."""
        form = majority(self.votes, self.planned)
        if form is None:
            alone = len({vote.record.family for vote in self.votes}) < 2
            return ("failed", self.without_vote[-1]) if alone and self.without_vote else ("no_majority", None)
        answers = preferred(self.votes, self.state.student_action, self.student, form)
        reasons = [obstacle(message, form, self.state) for message in answers]
        if None not in reasons:
            return "cannot_run", f"the majority's action cannot run: {reasons[0]}"
        return "agreed" if form == self.student else "overruled", None


def majority(votes: Sequence[Vote], planned: int) -> Canonical | None:
    """Return the form that more than half of the planned voters gave, if any.

    Models of one family err together, so one family alone decides nothing.
    """
    if not votes:
        return None
    form, count = Counter(vote.form for vote in votes).most_common(1)[0]
    families = {vote.record.family for vote in votes if vote.form == form}
    return form if 2 * count > planned and len(families) > 1 else None


def settled(votes: Sequence[Vote], planned: int) -> bool:
    """Return whether further votes cannot change the outcome."""
    open_votes = planned - len(votes)
    if majority(votes, planned) is not None or open_votes <= 0:
        return True
    most = max(Counter(vote.form for vote in votes).values(), default=0)
    return 2 * (most + open_votes) <= planned


def epsilon(agreeing: int, votes: int) -> float:
    """Return the probability that the label is wrong, in (0, 1/2]."""
    return min(1 - (agreeing + 0.5) / (votes + 1), 0.5)


def preferred(votes: Sequence[Vote], student: Message, student_form: Canonical, form: Canonical) -> list[Message]:
    """Return a majority's actions: the student's own where it agrees, else the votes'."""
    return [student] if form == student_form else [vote.message for vote in votes if vote.form == form]


def pairs_of(ballot: Ballot) -> list[Pair]:
    """Return the pairs that the votes give; chosen is the cheapest teacher's action that can run."""
    votes, state, form = ballot.votes, ballot.state, majority(ballot.votes, ballot.planned)
    if form is None:
        return []
    student = without_thinking(state.student_action)
    actions = preferred(votes, student, ballot.student, form)
    chosen = next((message for message in actions if obstacle(message, form, state) is None), None)
    if chosen is None:
        return []
    beaten = {ballot.student: student}
    if form == ballot.student:
        beaten = {vote.form: vote.message for vote in reversed(votes) if vote.form != form}
    pairs = []
    for other, rejected in beaten.items():
        sides = {form: "chosen", other: "rejected"}
        cast = {
            vote.record.teacher: {
                "family": vote.record.family,
                "form": vote.record.form,
                "answer": vote.record.answer,
                "for": sides.get(vote.form, "neither"),
            }
            for vote in votes
        }
        pair = Pair(
            trace=state.trace_id,
            state=PairState(state_id=state.state_id, messages=state.messages, tools=state.tools),
            chosen=chosen,
            rejected=rejected,
            epsilon=epsilon(sum(vote.form == form for vote in votes), len(votes)),
            teachers={"votes": cast, "planned": ballot.planned, "rejected_form": digest(other)},
            cost_usd=sum(vote.record.price_usd for vote in votes),
        )
        pairs.append(pair)
    return pairs


def obstacle(message: Message, form: Canonical, state: TraceState) -> str | None:
    """Return why an action of this form cannot run in the state, as far as its form tells.

    A call must be whole and name a tool of the state; an action in the text must be written as the trace does.
    """
    if "broken" in (form[0], *(part[0] for part in form[1:] if isinstance(part, tuple) and part)):
        return "the call is broken"
    names = {(tool.get("function") or {}).get("name") for tool in state.tools}
    for call in message.get("tool_calls") or []:
        if call["function"]["name"] not in names:
            return "the call names a tool that the state lacks"
    acts = None if state.tools else actions_in_text(message.get("content") or "")
    way = None if acts is None else way_of([state.student_action, *state.messages])
    return None if acts is None or way in (None, acts[0]) else f"it is written as {acts[0]}, the trace's as {way}"


def length_ratio(first: Message, second: Message) -> float:
    """Return the longer answer's characters over the shorter one's."""
    sizes = sorted(max(_size(message), _MIN_CHARS) for message in (first, second))
    return sizes[1] / sizes[0]


def without_thinking(message: Message) -> Message:
    """Return the message without its thinking, which is not known of teachers."""
    kept: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    return kept


def _size(message: Message) -> int:
    calls = message.get("tool_calls") or []
    call_chars = sum(len(call["function"]["name"]) + len(call["function"]["arguments"]) for call in calls)
    return len(message.get("content") or "") + call_chars
