"""Schedules as JSON: the file that ``zm localize --left paged:FILE.json`` reads.

    {"schema_version": 1, "events": [
      {"event": "step", "slices": [{"request": "a", "start": 0, "stop": 32}]},
      {"event": "hit", "request": "b", "source": "a", "upto": 16},
      {"event": "step", "slices": [{"request": "b", "start": 16, "stop": 40}], "padded_rows": 3}
    ]}

Only the shape is checked here (names, types, unknown keys); whether a schedule is legal depends on
the engine and is checked there. ``from_json(to_json(schedule)) == schedule``.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...kernels.errors import ScheduleError
from .base import Event, Evict, Hit, Mode, Preempt, Publish, Resume, Schedule, Slice, Step


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Slice(_Record):
    request: str
    start: int
    stop: int
    keep: int | None = None


class _Step(_Record):
    event: Literal["step"]
    slices: list[_Slice]
    padded_rows: int = 0
    mode: Mode = "eager"


class _Hit(_Record):
    event: Literal["hit"]
    request: str
    source: str
    upto: int


class _Drop(_Record):
    event: Literal["evict", "preempt", "resume"]
    request: str


class _Publish(_Record):
    event: Literal["publish"]
    version: int
    digest: str


class _File(_Record):
    schema_version: Literal[1]
    events: list[Annotated[_Step | _Hit | _Drop | _Publish, Field(discriminator="event")]]


_DROPS = {"evict": Evict, "preempt": Preempt, "resume": Resume}


def to_json(schedule: Schedule) -> str:
    """The schedule as a JSON document, one event per line."""
    lines = ",\n".join("  " + json.dumps(_event_dict(event)) for event in schedule.events)
    return f'{{"schema_version": 1, "events": [\n{lines}\n]}}\n'


def from_json(text: str) -> Schedule:
    """Parse a schedule document; :class:`ScheduleError` names every key that is wrong."""
    try:
        document = _File.model_validate_json(text)
    except ValidationError as error:
        problems = "\n  ".join(
            f"{'.'.join(map(str, item['loc'])) or 'document'}: {item['msg']}"
            for item in error.errors()
        )
        raise ScheduleError(
            f"not a schedule document:\n  {problems}\n"
            'an event looks like {"event": "step", "slices": '
            '[{"request": "a", "start": 0, "stop": 32}]}; correct the keys named above'
        ) from error
    return Schedule(events=tuple(_event(item) for item in document.events))


def load_schedule(path: Path) -> Schedule:
    """Read a schedule file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot read schedule file {path}: {error}; check the path") from error
    try:
        return from_json(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error


def _event(item: _Step | _Hit | _Drop | _Publish) -> Event:
    values: dict[str, Any] = item.model_dump(exclude={"event", "slices"})
    match item:
        case _Step():
            return Step(slices=tuple(Slice(**s.model_dump()) for s in item.slices), **values)
        case _Hit():
            return Hit(**values)
        case _Drop():
            return _DROPS[item.event](**values)
        case _Publish():
            return Publish(**values)


def _event_dict(event: Event) -> dict[str, Any]:
    name = type(event).__name__.lower()
    match event:
        case Step():
            slices = [_slice_dict(piece) for piece in event.slices]
            record: dict[str, Any] = {"event": name, "slices": slices}
            if event.padded_rows:
                record["padded_rows"] = event.padded_rows
            if event.mode != "eager":
                record["mode"] = event.mode
            return record
        case Hit():
            return {
                "event": name,
                "request": event.request,
                "source": event.source,
                "upto": event.upto,
            }
        case Publish():
            return {"event": name, "version": event.version, "digest": event.digest}
        case Evict() | Preempt() | Resume():
            return {"event": name, "request": event.request}


def _slice_dict(piece: Slice) -> dict[str, Any]:
    record = {"request": piece.request, "start": piece.start, "stop": piece.stop}
    return record if piece.keep is None else record | {"keep": piece.keep}
