"""What a driver and a model say to each other, in no provider's dialect.

A conversation is a list of turns: the task, what the model said, what its calls returned. An
adapter turns it into one request of its API and the answer into a :class:`Reply`; nothing else in
the driver knows which API that was.

    Reply(text="I look first.", calls=(Call(id="c1", name="localize", arguments={...}),),
          usage=Usage(input=812, output=40), stop="calls", raw=[...])
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ...kernels.errors import ZeroMismatchError

Stop = Literal["calls", "done", "cut", "refused"]
"""``calls``: wants tools; ``done``: says that it is done; ``cut``: out of room; ``refused``."""

FaultKind = Literal["key-refused", "rate-limited", "unreachable", "request-refused", "nonsense"]


class ProviderFault(ZeroMismatchError, RuntimeError):
    """The provider gave no usable answer. ``kind`` becomes the run's exit reason."""

    exit_code = 4

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind: FaultKind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, as the provider counted them; cached input counts as input."""

    input: int = 0
    output: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(input=self.input + other.input, output=self.output + other.output)

    @property
    def total(self) -> int:
        """Both together."""
        return self.input + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call as the model wrote it. arguments: None where they are no JSON object."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    written: str = ""
    """The text of arguments that could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of the model. raw: the provider's own items, sent back word for word."""

    text: str
    calls: tuple[Call, ...]
    usage: Usage
    stop: Stop
    raw: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What a call came to. effect: whether something outside may have changed."""

    id: str
    text: str
    is_error: bool
    effect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Words of the driver to the model: the task, or why it is not done yet."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The results of all calls of the reply before it, in the calls' order."""

    results: tuple[Returned, ...]


Turn = Told | Reply | Results


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as the model sees it. read_only, destructive: the server's annotations."""

    name: str
    description: str
    schema: dict[str, Any]
    read_only: bool = False
    destructive: bool = True


def broken_rules(text: str) -> list[str]:
    """Rules that a tool's result names as broken."""
    lines = (line.partition("rule broken: ") for line in text.splitlines())
    return [rule.strip() for _, found, rule in lines if found]


class Provider(Protocol):
    """An adapter: one request, one reply. ``name`` and ``model`` go into the transcript."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> str: ...

    async def reply(
        self,
        system: str,
        turns: Sequence[Turn],
        tools: Sequence[ToolSpec],
        *,
        max_output: int,
        seconds: float | None,
    ) -> Reply:
        """Ask once (with the SDK's own retries), within ``seconds``."""
        ...

    async def close(self) -> None:
        """Give the connections back."""
        ...


ELIDED = "[left out here to save room; call the tool again if you need it] "
KEPT_CHARACTERS = 160


def compact(turns: Sequence[Turn], keep: int) -> list[Turn]:
    """The same conversation with old results shortened; the last ``keep`` turns stay whole.

    Every call and its id stays, so that the model still sees what it did.
    """
    old = max(0, len(turns) - keep)
    return [_short(turn) if place < old else turn for place, turn in enumerate(turns)]


def _short(turn: Turn) -> Turn:
    if not isinstance(turn, Results):
        return turn
    return Results(
        results=tuple(
            entry
            if len(entry.text) <= KEPT_CHARACTERS + len(ELIDED)
            else Returned(
                id=entry.id,
                text=ELIDED + entry.text[:KEPT_CHARACTERS],
                is_error=entry.is_error,
                effect=entry.effect,
            )
            for entry in turn.results
        )
    )
