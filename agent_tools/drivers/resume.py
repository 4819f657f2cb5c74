"""Going on with an interrupted run, and running a finished one again without any network.

    outcome = await resume(folder, job, provider, toolbox, judge)
    replay(folder)

Resume rebuilds the state from the transcript. A call that was attempted and never returned may or
may not have had its effect, so it is never repeated: the model is told, and has to look first. A
reading tool has no effect and is simply called again. Replay drives the same loop with the recorded
replies, results and verdicts, sitting by sitting, and fails when the loop writes something else.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...kernels.errors import MisalignedError, UsageError
from .budgets import Stall, budgets_from
from .conversation import (
    Call,
    Provider,
    ProviderFault,
    Reply,
    Results,
    Returned,
    Told,
    ToolSpec,
    Usage,
)
from .external import replay_program
from .loop import (
    Job,
    Judge,
    Judgement,
    Outcome,
    Run,
    Toolbox,
    ToolsLostError,
    drive,
    result_data,
)
from .programs import PROGRAMS
from .transcript import Entry, Transcript, read_transcript, require_open

UNKNOWN = (
    "The run was interrupted while this call was under way, and whether it took effect is not "
    "known. It was not repeated. Look at the state with a reading tool before you call it again."
)


async def resume(
    folder: Path, job: Job, provider: Provider, toolbox: Toolbox, judge: Judge,
    secrets: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """Go on where the transcript ends. UsageError when the run is over, or its file is damaged."""
    job.budgets.check()
    entries = read_transcript(folder)
    now = {"task": job.task, "provider": provider.name, "model": provider.model}
    require_open(entries, now, folder)
    transcript, entries = Transcript.reopen(folder, secrets)
    run = Run(
        job=job, provider=provider, toolbox=toolbox, judge=judge, transcript=transcript,
        stall=Stall(job.budgets), turns=[Told(text=job.task)], began=job.clock(),
        before=entries[-1].elapsed,
    )  # fmt: skip
    given = {"at": len(entries), "budgets": asdict(job.budgets)}
    transcript.append("resumed", run.elapsed, given)
    await _rebuild(run, entries[1:])
    return await run.go()


async def _rebuild(run: Run, entries: list[Entry]) -> None:
    """Replay the journal into the run's state, then answer the calls that are open."""
    specs = {spec.name: spec for spec in await run.toolbox.tools()}
    run.specs = dict(specs)
    results: list[Returned] = []
    calls: dict[str, Call] = {}
    attempted: set[str] = set()
    for entry in entries:
        data = entry.data
        match entry.kind:
            case "reply":
                _close(run, results)
                if run.replies:
                    run.stall.turn()
                reply = reply_from(data)
                run.turns.append(reply)
                run.replies += 1
                run.usage += reply.usage
                run.last_input = reply.usage.input
                calls, attempted = {call.id: call for call in reply.calls}, set()
            case "attempted":
                attempted.add(data["id"])
                run.calls += 1
                run.per_tool[data["name"]] = run.per_tool.get(data["name"], 0) + 1
            case "returned":
                answer = returned_from(data)
                results.append(answer)
                run.unjudged |= answer.effect and not answer.is_error
                run.stall.note(calls[answer.id], answer, made=data["made"])
            case "told":
                run.turns.append(Told(text=data["text"]))
                run.nudges += data["text"].startswith("The gates are not green")
            case "verdict":
                run.unjudged = False
            case _:
                pass
    answered = {result.id for result in results}
    last = next((turn for turn in reversed(run.turns) if isinstance(turn, Reply)), None)
    open_calls = [call for call in last.calls if call.id not in answered] if last else []
    if last is not None and run.turns[-1] is last and last.calls:
        for call in open_calls:
            results.append(await _answer_open(run, call, call.id in attempted))
        order = {call.id: place for place, call in enumerate(last.calls)}
        results.sort(key=lambda result: order[result.id])
        _close(run, results)


def _close(run: Run, results: list[Returned]) -> None:
    if results:
        run.turns.append(Results(results=tuple(results)))
        results.clear()


async def _answer_open(run: Run, call: Call, attempted: bool) -> Returned:
    spec = run.specs.get(call.name)
    if not attempted or (spec is not None and spec.read_only):
        return await run.call(call)
    answer = Returned(id=call.id, text=UNKNOWN, is_error=True, effect=True)
    run.unjudged = True
    run.transcript.append("returned", run.elapsed, {"made": True, "id": call.id,
                                                    **result_data(answer)})  # fmt: skip
    return answer


def reply_from(data: dict[str, Any]) -> Reply:
    """A reply as it was written."""
    return Reply(
        text=data["text"],
        calls=tuple(Call(**call) for call in data["calls"]),
        usage=Usage(**data["usage"]),
        stop=data["stop"],
        raw=data["raw"],
    )


def returned_from(data: dict[str, Any]) -> Returned:
    """A result as it was written."""
    return Returned(
        id=data["id"], text=data["text"], is_error=data["is_error"], effect=data["effect"]
    )


# -- replay --------------------------------------------------------------------------------------

OUTSIDE = frozenset(
    ("key-refused", "rate-limited", "unreachable", "request-refused", "nonsense", "tools-lost",
     "cancelled", "budget-time")
)  # fmt: skip
"""Ends that the loop did not decide: replay takes them from the record."""


@dataclass(slots=True)
class _Recorded:
    """Provider, toolbox and judge in one, all from a transcript."""

    entries: list[Entry]
    name: str
    model: str
    specs: tuple[ToolSpec, ...]
    place: int = 0
    asked: list[str] = field(default_factory=list[str])

    def next(self, *kinds: str) -> Entry:
        while self.place < len(self.entries):
            entry = self.entries[self.place]
            self.place += 1
            if entry.kind in kinds or entry.kind == "end":
                return entry
        raise ProviderFault("unreachable", "the record ends here")

    async def reply(self, *_: object, **__: object) -> Reply:
        entry = self.next("reply")
        if entry.kind == "end":
            raise ProviderFault("unreachable", "the record ends here")
        return reply_from(entry.data)

    async def close(self) -> None:
        """Nothing is open."""

    async def tools(self) -> Sequence[ToolSpec]:
        return self.specs

    async def call(self, name: str, arguments: dict[str, Any]) -> Returned:
        entry = self.next("attempted")
        if entry.kind == "end":
            raise ToolsLostError("the record ends here")
        if (entry.data["name"], entry.data["arguments"]) != (name, arguments):
            raise MisalignedError(
                f"replay calls {name} where the record has {entry.data['name']} (entry "
                f"{entry.n}); replay with the version that wrote the transcript"
            )
        entry = self.next("returned")
        if entry.kind == "end":
            raise ToolsLostError("the record ends here")
        return returned_from(entry.data)

    def judge(self) -> Judgement:
        entry = self.next("verdict")
        if entry.kind == "end":
            raise MisalignedError("replay asks the gates where the record did not; report this")
        return Judgement.model_validate(entry.data)


def replay(folder: Path) -> Outcome:
    """The run again, offline, from its transcript; MisalignedError when it now goes another way."""
    entries = read_transcript(folder)
    if not entries or entries[-1].kind != "end":
        raise UsageError(f"the run in {folder} has not ended; resume it first")
    if entries[0].data["provider"] in PROGRAMS:
        return replay_program(entries)
    end = entries[-1].data
    starts = [0, *(entry.n for entry in entries if entry.kind == "resumed"), len(entries)]
    sittings = [_again(entries, *each) for each in pairwise(starts)]
    found = sittings[-1]
    same = (found.turns, found.calls, found.tokens) == (end["turns"], end["calls"], end["tokens"])
    if not same or (found.reason != end["reason"] and end["reason"] not in OUTSIDE):
        raise MisalignedError(
            f"replay ends by {found.reason} after {found.turns} turns and {found.calls} calls, the "
            f"record by {end['reason']} after {end['turns']} and {end['calls']}; replay with the "
            "version that wrote the transcript"
        )
    return Outcome.model_validate(end)


def _again(entries: list[Entry], start: int, stop: int) -> Outcome:
    """One sitting, ``entries[start:stop]``; it has to write what the record holds."""
    begin, before, sitting = entries[0].data, entries[:start], entries[start:stop]
    recorded = _Recorded(
        entries=sitting[1:], name=begin["provider"], model=begin["model"],
        specs=tuple(ToolSpec(**spec) for spec in begin["tools"]),
    )  # fmt: skip
    unmade = {e.data["id"] for e in entries if e.kind == "returned" and not e.data["made"]}
    job = Job(
        task=begin["task"],
        system=begin["system"],
        budgets=budgets_from(sitting[0].data["budgets"]),
        approve=lambda call: call.id not in unmade,
        clock=lambda: 0.0,
    )
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        given = (recorded, recorded, recorded.judge)
        if before:
            written = Transcript.begin(place)
            for entry in before:
                written.append(entry.kind, entry.elapsed, entry.data)
            found = asyncio.run(resume(place, job, *given))
        else:
            found = asyncio.run(drive(job, *given, place))
        again = read_transcript(place)[start:]
    for old, new in zip(sitting, again, strict=False):
        if old.kind != "end" and (old.kind, old.data) != (new.kind, new.data):
            raise MisalignedError(
                f"replay writes {new.kind} as entry {old.n}, where the record has another "
                f"{old.kind}; replay with the version that wrote the transcript"
            )
    return found
