"""The loop: a model, its tools, and the gates that decide whether it is done.

    outcome = await drive(job, provider, toolbox, judge, transcript)
    outcome.reason, outcome.exit_code

One loop for every provider. The model chooses what to try; whether something is done is the judge's
word (the gates), asked when the model stops and once more at the end. Each way to end has a name of
its own, see :data:`EXITS`. Every call is journalled before it runs (``attempted``) and after
(``returned``), so that :func:`resume` knows which effect is pending, and never repeats it.

Left out: HTTP (``anthropic_api.py``, ``openai_api.py``), the tools themselves (``toolbox.py``).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ..records import Record
from .budgets import Budgets, Stall
from .conversation import (
    Call,
    Provider,
    ProviderFault,
    Reply,
    Results,
    Returned,
    Told,
    ToolSpec,
    Turn,
    Usage,
    broken_rules,
    compact,
)
from .transcript import Transcript

EXITS: dict[str, tuple[int, str]] = {
    "passed": (0, "the gates are green"),
    "needs-tick": (3, "everything is green, and a new contract waits for a person's tick"),
    "stopped-early": (1, "the model stopped while the gates were not green"),
    "no-progress": (1, "several turns in a row brought nothing new"),
    "repeated-call": (1, "the same call was made again and again"),
    "malformed-calls": (1, "the model could not write calls that can be made"),
    "refused": (1, "the model declined the task"),
    "budget-turns": (5, "all turns are used up"),
    "budget-tokens": (5, "all tokens are used up"),
    "budget-money": (5, "all money is used up"),
    "budget-time": (5, "the time is used up"),
    "budget-calls": (5, "all calls of one tool are used up"),
    "budget-unheld": (4, "no log of codex tells what it uses: set CODEX_HOME, or drop its limits"),
    "key-refused": (4, "the provider refused the key"),
    "rate-limited": (4, "the provider's rate limit held for all retries"),
    "unreachable": (4, "the provider could not be reached, or failed on all retries"),
    "request-refused": (4, "the provider refused the request"),
    "nonsense": (4, "the provider's answer could not be understood"),
    "program-failed": (4, "the external program ended with an error"),
    "tools-lost": (4, "the tool server went away"),
    "cancelled": (130, "somebody stopped the run"),
}
"""Exit reason -> (exit code of ``zm``, what it means)."""

KEPT_TURNS = 8
FINAL_JUDGEMENT = frozenset(
    ("no-progress", "repeated-call", "malformed-calls", "budget-turns", "budget-tokens",
     "budget-money", "budget-calls", "refused")
)  # fmt: skip


class ToolsLostError(ConnectionError):
    """The tools cannot be reached any more."""


class Judgement(Record):
    """What the judge says. rule: which rule was broken, where one was.

    Judgement(passed=False, reason="C3 is red: 12 of 226 tokens differ")
    """

    passed: bool
    reason: str
    rule: str | None = None
    waits: str | None = None
    """What a person has to tick; nothing else is missing then."""
    green: int = 0
    """Gates that are green, of ``of``."""
    of: int = 0


class Toolbox(Protocol):
    """Tools that can be called; ``call`` raises ToolsLostError and nothing else."""

    async def tools(self) -> Sequence[ToolSpec]: ...

    async def call(self, name: str, arguments: dict[str, Any]) -> Returned:
        """The result, with an empty id."""
        ...


Judge = Callable[[], Judgement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One task. approve: asked before each destructive call; the default approves none."""

    task: str
    system: str
    budgets: Budgets
    approve: Callable[[Call], bool] = lambda call: False
    clock: Callable[[], float] = time.monotonic
    progress: Callable[[str], None] = lambda stage: None


class Outcome(Record):
    """How a run ended. ``rules``: rules that tools or gates named as broken."""

    reason: str
    detail: str
    turns: int
    calls: int
    tokens: int
    money: float | None
    seconds: float
    rules: tuple[str, ...]
    transcript: str

    @property
    def exit_code(self) -> int:
        """See :data:`EXITS`."""
        return EXITS[self.reason][0]


class _End(Exception):
    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(slots=True)
class Run:
    """The state of one run; all of it can be rebuilt from the transcript."""

    job: Job
    provider: Provider
    toolbox: Toolbox
    judge: Judge
    transcript: Transcript
    stall: Stall
    turns: list[Turn] = field(default_factory=list[Turn])
    replies: int = 0
    calls: int = 0
    nudges: int = 0
    usage: Usage = field(default_factory=Usage)
    last_input: int = 0
    before: float = 0.0
    began: float = 0.0
    unjudged: bool = False
    per_tool: dict[str, int] = field(default_factory=dict[str, int])
    rules: list[str] = field(default_factory=list[str])
    specs: dict[str, ToolSpec] = field(default_factory=dict[str, ToolSpec])

    # -- the flow --------------------------------------------------------------------------------

    async def go(self) -> Outcome:
        """Until it ends; whatever the end, the transcript has it."""
        try:
            await self._settle()
            while True:
                await self._turn()
        except _End as end:
            return await self._finish(end.reason, end.detail)
        except ProviderFault as fault:
            return await self._finish(fault.kind, str(fault))
        except ToolsLostError as lost:
            return await self._finish("tools-lost", str(lost))
        except asyncio.CancelledError:
            await self._finish("cancelled", "")
            raise

    async def _turn(self) -> None:
        budgets = self.job.budgets
        spent = budgets.spent(self.replies, self.usage, self.elapsed)
        if spent:
            raise _End(spent)
        self.job.progress(f"turn {self.replies + 1}, {self.usage.total:,} tokens so far")
        full = self.last_input > budgets.context_tokens
        shown = compact(self.turns, KEPT_TURNS) if full else self.turns
        left = None if budgets.seconds is None else budgets.seconds - self.elapsed
        limit = asyncio.timeout(left)
        try:
            async with limit:
                reply = await self.provider.reply(
                    self.job.system, shown, list(self.specs.values()),
                    max_output=budgets.output_left(self.usage), seconds=left,
                )  # fmt: skip
        except TimeoutError:
            if not limit.expired():
                raise ProviderFault("unreachable", "the model did not answer in time") from None
            raise _End("budget-time", "while waiting for the model") from None
        self._heard(reply)
        self._write("reply", reply_data(reply))
        if reply.stop == "refused":
            raise _End("refused", reply.text[:300])
        if reply.calls:
            results = [await self.call(call) for call in reply.calls]
            self.turns.append(Results(results=tuple(results)))
        else:
            await self._stopped(reply)
        stalled = self.stall.turn()
        if stalled:
            raise _End(stalled)

    def _heard(self, reply: Reply) -> None:
        self.turns.append(reply)
        self.replies += 1
        self.usage += reply.usage
        self.last_input = reply.usage.input

    async def _stopped(self, reply: Reply) -> None:
        """The model wants no more tools: the gates say whether that is the end."""
        if reply.stop == "cut":
            self._tell("Your answer was cut off for its length. Go on in smaller steps.")
            return
        found = await self._judged()
        if found.passed:
            raise _End("passed", found.reason)
        if found.waits:
            raise _End("needs-tick", found.waits)
        if self.nudges >= self.job.budgets.nudges:
            raise _End("stopped-early", found.reason)
        self.nudges += 1
        self._tell(
            f"The gates are not green: {found.reason}\nOnly they decide. Go on with the tools; if "
            "a person has to decide something, say what and why, and stop again."
        )

    async def call(self, call: Call) -> Returned:
        """Check, journal, run, journal."""
        refusal = self._why_not(call)
        if refusal is not None:
            answer = Returned(id=call.id, text=refusal, is_error=True)
            self._write("returned", {"id": call.id, "made": False, **result_data(answer)})
            self.stall.note(call, answer, made=False)
            return answer
        spec = self.specs[call.name]
        self.per_tool[call.name] = self.per_tool.get(call.name, 0) + 1
        limit = self.job.budgets.calls
        if limit is not None and self.per_tool[call.name] > limit:
            raise _End("budget-calls", call.name)
        self.calls += 1
        self.job.progress(f"{call.name}")
        self._write(
            "attempted",
            {"id": call.id, "name": call.name, "arguments": call.arguments,
             "effect": not spec.read_only},
        )  # fmt: skip
        seconds = self.job.budgets.seconds
        left = None if seconds is None else max(0.0, seconds - self.elapsed)
        deadline = asyncio.timeout(left)
        try:
            async with deadline:
                found = await self.toolbox.call(call.name, call.arguments or {})
        except TimeoutError:
            if not deadline.expired():
                raise ToolsLostError(f"{call.name} did not return in time") from None
            raise _End("budget-time", f"while {call.name} ran") from None
        answer = replace(found, id=call.id, effect=not spec.read_only)
        self.unjudged |= answer.effect and not answer.is_error
        self._write("returned", {"id": call.id, "made": True, **result_data(answer)})
        self._learn(answer)
        self.stall.note(call, answer, made=True)
        return answer

    def _why_not(self, call: Call) -> str | None:
        """Why a call is not made, in words that a model can act on."""
        import jsonschema

        spec = self.specs.get(call.name)
        if spec is None:
            return f"there is no tool {call.name!r}; the tools are {', '.join(sorted(self.specs))}"
        if call.arguments is None:
            return f"the arguments of {call.name} are no JSON object: {call.written[:200]!r}"
        try:
            jsonschema.validate(call.arguments, spec.schema)
        except jsonschema.ValidationError as error:
            where = ".".join(map(str, error.absolute_path)) or "the arguments"
            return f"{call.name}: {where}: {error.message[:300]}; see the tool's schema"
        if spec.destructive and not spec.read_only and not self.job.approve(call):
            return f"{call.name} needs a person's approval, which was not given; do without it"
        return None

    # -- bookkeeping -----------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        """Seconds of the whole run, earlier sittings included."""
        return self.before + self.job.clock() - self.began

    def _write(self, kind: str, data: dict[str, Any]) -> None:
        self.transcript.append(kind, self.elapsed, data)

    def _tell(self, text: str) -> None:
        self.turns.append(Told(text=text))
        self._write("told", {"text": text})

    def _learn(self, answer: Returned) -> None:
        self.rules += [rule for rule in broken_rules(answer.text) if rule not in self.rules]

    async def _judged(self) -> Judgement:
        self.job.progress("the gates judge")
        found = await asyncio.to_thread(self.judge)
        self.unjudged = False
        self._write("verdict", found.model_dump())
        if found.rule and found.rule not in self.rules:
            self.rules.append(found.rule)
        return found

    async def _settle(self) -> None:
        """A resumed run may have broken off before the gates answered the model's last word."""
        last = self.turns[-1]
        if isinstance(last, Reply):
            assert not last.calls, "resume answers open calls before the run goes on"
            await self._stopped(last)

    async def _finish(self, reason: str, detail: str) -> Outcome:
        if self.unjudged and reason in FINAL_JUDGEMENT:
            found = await self._judged()
            if found.passed or found.waits:
                ended = f"(the model itself ended by {reason})"
                reason = "passed" if found.passed else "needs-tick"
                detail = f"{found.waits or found.reason} {ended}"
        price = self.job.budgets.price
        outcome = Outcome(
            reason=reason,
            detail=detail or EXITS[reason][1],
            turns=self.replies,
            calls=self.calls,
            tokens=self.usage.total,
            money=None if price is None else price.of(self.usage),
            seconds=self.elapsed,
            rules=tuple(self.rules),
            transcript=str(self.transcript.path),
        )
        self._write("end", outcome.model_dump())
        return outcome


def reply_data(reply: Reply) -> dict[str, Any]:
    """A reply as the transcript keeps it."""
    return {
        "text": reply.text,
        "calls": [
            {"id": c.id, "name": c.name, "arguments": c.arguments, "written": c.written}
            for c in reply.calls
        ],
        "usage": {"input": reply.usage.input, "output": reply.usage.output},
        "stop": reply.stop,
        "raw": reply.raw,
    }


def result_data(answer: Returned) -> dict[str, Any]:
    """A result as the transcript keeps it."""
    return {"text": answer.text, "is_error": answer.is_error, "effect": answer.effect}


async def drive(
    job: Job, provider: Provider, toolbox: Toolbox, judge: Judge, folder: Path,
    secrets: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """Run a job from its beginning; the transcript goes into ``folder``."""
    job.budgets.check()
    transcript = Transcript.begin(folder, secrets)
    run = Run(
        job=job, provider=provider, toolbox=toolbox, judge=judge, transcript=transcript,
        stall=Stall(job.budgets), turns=[Told(text=job.task)], began=job.clock(),
    )  # fmt: skip
    specs = await toolbox.tools()
    run.specs = {spec.name: spec for spec in specs}
    transcript.append("begin", 0.0, begin_data(job, provider, specs))
    return await run.go()


def begin_data(job: Job, provider: Provider, specs: Sequence[ToolSpec]) -> dict[str, Any]:
    """What a transcript opens with."""
    return {
        "task": job.task,
        "system": job.system,
        "provider": provider.name,
        "model": provider.model,
        "budgets": asdict(job.budgets),
        "tools": [asdict(spec) for spec in specs],
    }
