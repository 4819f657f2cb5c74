"""What a run may spend, and when it is going nowhere.

Turns, tokens, money and seconds; zero means that nothing may be spent, so that the run ends before
its first request. Prices are never guessed: a money budget needs ``price``, or ``waive_money``.

    Budgets(turns=40, tokens=400_000, money=2.0, seconds=1800, price=Price(input=3, output=15))
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from ...kernels.errors import UsageError
from .conversation import Call, Returned, Usage

Spent = Literal["budget-turns", "budget-tokens", "budget-money", "budget-time", "budget-calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """US dollars per million tokens. Cached input is charged as input: an upper bound."""

    input: float
    output: float

    @classmethod
    def parse(cls, text: str) -> "Price":
        """``"3:15"``: input, output."""
        try:
            given, made = (float(part) for part in text.split(":"))
        except ValueError as error:
            raise UsageError(
                f"price {text!r} is not INPUT:OUTPUT in dollars per million tokens, such as 3:15"
            ) from error
        if not (0 <= given < float("inf") and 0 <= made < float("inf")):
            raise UsageError(f"price {text!r} is negative or endless; give what is charged")
        return cls(input=given, output=made)

    def of(self, usage: Usage) -> float:
        """Dollars."""
        return (self.input * usage.input + self.output * usage.output) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """None: no limit of that kind. calls: per tool. quiet_turns, repeats: see :class:`Stall`."""

    turns: int | None = 60
    tokens: int | None = 2_000_000
    money: float | None = None
    seconds: float | None = 3600.0
    calls: int | None = None
    price: Price | None = None
    waive_money: bool = False
    quiet_turns: int = 6
    repeats: int = 3
    malformed: int = 5
    nudges: int = 2
    output_tokens: int = 16_000
    context_tokens: int = 150_000

    def check(self) -> None:
        """Raise UsageError for what makes no sense."""
        for name in ("turns", "tokens", "money", "seconds", "calls"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError(f"the budget of {name} is {value}; give zero or more")
        if self.money is not None and self.price is None:
            raise UsageError(
                "a budget in money needs the model's price; give --price INPUT:OUTPUT in dollars "
                "per million tokens"
            )
        if self.money is None and not self.waive_money:
            raise UsageError(
                "what this may cost is not limited; give --max-money and --price, or say "
                "--waive-money"
            )

    def spent(self, turns: int, usage: Usage, seconds: float) -> Spent | None:
        """The first budget that is used up."""
        if self.turns is not None and turns >= self.turns:
            return "budget-turns"
        if self.tokens is not None and usage.total >= self.tokens:
            return "budget-tokens"
        if self.money is not None and self.price and self.price.of(usage) >= self.money:
            return "budget-money"
        if self.seconds is not None and seconds >= self.seconds:
            return "budget-time"
        return None

    def output_left(self, usage: Usage) -> int:
        """How many tokens the next reply may have."""
        left = self.output_tokens
        if self.tokens is not None:
            left = min(left, self.tokens - usage.total)
        return max(1, left)


def budgets_from(data: dict[str, Any]) -> Budgets:
    """Budgets as ``dataclasses.asdict`` wrote them into a transcript."""
    price = data["price"]
    given: dict[str, Any] = {**data, "price": Price(**price) if price else None}
    return Budgets(**given)


@dataclass(slots=True)
class Stall:
    """Notices a run that goes nowhere.

    ``repeated-call``: the same call gave the same result ``repeats`` times, or was made three times
    as often whatever it gave. ``no-progress``: ``quiet_turns`` turns in a row brought no result
    that was not seen before. ``malformed-calls``: so many calls in a row could not be made at all.
    """

    budgets: Budgets
    seen: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])
    results: set[str] = field(default_factory=set[str])
    quiet: int = 0
    malformed: int = 0
    repeated: bool = False

    def note(self, call: Call, result: Returned, *, made: bool) -> None:
        """One call and its result. made: whether it reached the tool."""
        self.malformed = 0 if made else self.malformed + 1
        key = (call.name, repr(sorted((call.arguments or {}).items())))
        self.seen[key] += 1
        self.seen[*key, result.text] += 1
        often = self.seen[*key, result.text] >= self.budgets.repeats
        self.repeated |= made and (often or self.seen[key] >= 3 * self.budgets.repeats)
        if made:
            self.heard(result)

    def heard(self, result: Returned) -> None:
        """A result that was not seen before is progress."""
        if not result.is_error and result.text not in self.results:
            self.results.add(result.text)
            self.quiet = -1

    def turn(self) -> Literal["repeated-call", "no-progress", "malformed-calls"] | None:
        """After each turn: whether to stop."""
        self.quiet += 1
        if self.malformed >= self.budgets.malformed:
            return "malformed-calls"
        if self.repeated:
            return "repeated-call"
        return "no-progress" if self.quiet >= self.budgets.quiet_turns else None
