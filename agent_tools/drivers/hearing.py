"""What an external program says about itself: for record and budgets, never for the verdict.

    hearing = Hearing()
    hearing.sit_down(budgets, elapsed=0.0)       # once a sitting: the run's start, and each resume
    hearing.hear(event)                          # each line of its output
    hearing.session, hearing.pending, hearing.usage, hearing.stop

The same events give the same state, so that a transcript can be heard again: a resumed run begins
where the record ends, and a replay needs no program.

Sources: ``claude --output-format stream-json`` tells ``session_id`` in every event, the usage of
each step in ``assistant`` events (several of one ``message.id`` tell the same), and the sum in
``result``; what a step wrote may be told late, what it read is not. A resumed process tells its own
part; from 2.1.277 on also what the session had saved at its orderly end, which an interrupted one
has not, so a sum over sittings may count too much and never too little. ``codex exec --json`` tells
``thread_id`` in ``thread.started``, and in the ``turn.completed`` that ends it the usage of the
whole thread, earlier sittings included; its item ids begin anew in each sitting
(codex-rs/exec/src/exec_events.rs, event_processor_with_jsonl_output.rs). What it used before its
end is read from its log (``codex_log.py``); where a limit needs that and the log tells nothing
within :data:`PATIENCE` items, the run ends.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .budgets import Budgets, Stall
from .conversation import Call, Returned, Usage, broken_rules

SERVER = "zero-mismatch"
OURS = f"mcp__{SERVER}__"
"""How ``claude`` begins the names of the workbench's tools."""
ENDS = {"error_max_turns": "budget-turns", "error_max_budget_usd": "budget-money"}
"""What ``claude`` calls the end of a budget, and what we call it."""
WORKS = ("mcp_tool_call", "command_execution", "file_change", "web_search", "collab_tool_call")
"""Items of ``codex`` that do something."""
SESSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.:-]{0,127}")
RESULTS = ("result", "error", "aggregated_output", "exit_code", "changes")
SHOWN = 200
PATIENCE = 3


@dataclass(slots=True)
class _Sitting:
    """What one process told."""

    steps: dict[str, Usage] = field(default_factory=dict[str, Usage])
    total: Usage = field(default_factory=Usage)
    turns: int | None = None
    money: float | None = None
    thread: bool = False
    """Whether ``total`` is the thread's, earlier sittings included."""

    @property
    def usage(self) -> Usage:
        """The program's own sum, or that of its steps where it has told no more yet."""
        steps = sum(self.steps.values(), Usage())
        return max(steps, self.total, key=lambda usage: usage.total)


class Hearing:
    """See the module."""

    def __init__(self) -> None:
        self.session = ""
        """The program's name of the session, told last; empty: none was told."""
        self.stop: str | None = None
        """Why the program has to be ended, from the first event that shows it."""
        self.end = ""
        """The end that the program itself gives: a budget's name, or empty."""
        self.worked = False
        self.said = ""
        """The last words that were no event, or told an error."""
        self.budgets = Budgets()
        self.called: Counter[str] = Counter()
        self.rules: list[str] = []
        """Rules that the workbench's tools named as broken."""
        self._logged = 0
        self._items = 0
        self._made: dict[str, Call] = {}
        self._open: dict[str, str] = {}
        self._untold: list[str] = []
        self._sittings: list[_Sitting] = []
        self._stall = Stall(self.budgets)

    def sit_down(self, budgets: Budgets, elapsed: float) -> None:
        """A process is to begin; :attr:`stop` says whether something is used up before it does."""
        self.budgets = self._stall.budgets = budgets
        self._sittings.append(_Sitting())
        self._untold = self.pending
        self._open, self._made, self.end, self.said, self._items = {}, {}, "", "", 0
        limits: tuple[tuple[str, float, float | None], ...] = (
            ("budget-turns", self.turns, budgets.turns),
            ("budget-tokens", self.usage.total, budgets.tokens),
            ("budget-money", self.money or 0.0, budgets.money),
            ("budget-time", elapsed, budgets.seconds),
        )
        over = (name for name, used, most in limits if most is not None and used >= most)
        self.stop = next(over, None) or self._spent()

    @property
    def pending(self) -> list[str]:
        """Calls without a result, and those of before until the model has answered since."""
        return [*self._untold, *self._open.values()]

    # -- sums over all sittings ------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        told = [each for each in self._sittings if each.thread]
        rest = sum((each.usage for each in self._sittings if not each.thread), Usage())
        return rest + (told[-1].usage if told else Usage())

    @property
    def turns(self) -> int:
        """As the program counts them, or its steps where it has not said."""
        return self._logged or sum(
            len(each.steps) if each.turns is None else each.turns for each in self._sittings
        )

    @property
    def money(self) -> float | None:
        """US dollars: as told, or by the price; None where neither is known."""
        price = self.budgets.price
        parts = [
            each.money if each.money is not None or price is None else price.of(each.usage)
            for each in self._sittings
            if each.money is not None or each.usage.total
        ]
        if None in parts or (not parts and price is None):
            return None
        return sum(part for part in parts if part is not None)

    @property
    def calls(self) -> int:
        """Calls of tools that it began."""
        return self.called.total()

    def _spent(self) -> str | None:
        """The budget that is used up while it runs; ``claude`` holds turns and money itself."""
        held = self.budgets
        if held.tokens is not None and self.usage.total >= held.tokens:
            return "budget-tokens"
        if self._logged and held.turns is not None and self.turns >= held.turns:
            return "budget-turns"
        if self._logged and held.money is not None and (self.money or 0.0) >= held.money:
            return "budget-money"
        if held.calls is not None and max(self.called.values(), default=0) > held.calls:
            return "budget-calls"
        limited = (held.turns, held.tokens, held.money) != (None, None, None)
        blind = limited and not self._logged and self._items >= PATIENCE
        return "budget-unheld" if blind else None

    def used(self, news: dict[str, Any]) -> None:
        """What the log of ``codex`` tells of the whole thread."""
        now = self._sittings[-1]
        now.total, now.thread = _usage(news.get("usage")), True
        self._logged = _number(news.get("steps"), self._logged)
        self.stop = self.stop or self._spent()

    # -- one line of output ----------------------------------------------------------------------

    def hear(self, event: dict[str, Any]) -> None:
        """One line of output."""
        self.worked = True
        told = event.get("thread_id") if event.get("type") == "thread.started" else None
        name = str(told or event.get("session_id") or "")
        self.session = name if SESSION.fullmatch(name) else self.session
        stalled = self._heard(event)
        self.stop = self.stop or self._spent() or stalled

    def _heard(self, event: dict[str, Any]) -> str | None:
        now = self._sittings[-1]
        kind, item, message = (event.get(name) for name in ("type", "item", "message"))
        if kind == "result":
            now.turns = _number(event.get("num_turns"), len(now.steps))
            cost = event.get("total_cost_usd")
            now.money = float(cost) if isinstance(cost, int | float) else None
            now.total = _usage(event.get("usage"))
            self.end = ENDS.get(str(event.get("subtype")), self.end)
            if event.get("is_error"):
                self.said = _text(event.get("errors") or event.get("result"))
        elif kind == "turn.completed":
            now.turns = 1 + (now.turns or 0)
            now.total, now.thread = _usage(event.get("usage")), True
        elif kind in ("error", "turn.failed", "text"):
            self.said = _text(message or event.get("error") or event.get("text"))
        elif kind in ("item.started", "item.completed") and isinstance(item, dict):
            return self._item(item, done=kind == "item.completed")
        elif kind == "assistant" and isinstance(message, dict):
            return self._step(now, message)
        elif kind == "user" and isinstance(message, dict):
            for part in _parts(message):
                if part.get("type") == "tool_result":
                    self._returned(str(part.get("tool_use_id")), _text(part.get("content")),
                                   bool(part.get("is_error")))  # fmt: skip
        return None

    def _step(self, now: _Sitting, message: dict[str, Any]) -> str | None:
        self._untold = []
        name, told = str(message.get("id")), _usage(message.get("usage"))
        new = name not in now.steps
        now.steps[name] = max(told, now.steps.get(name, told), key=lambda each: each.total)
        stalled = self._stall.turn() if new and len(now.steps) > 1 else None
        for part in _parts(message):
            if part.get("type") == "tool_use":
                self._begun(part.get("id"), str(part.get("name")), part.get("input"))
        return stalled

    def _item(self, item: dict[str, Any], *, done: bool) -> str | None:
        self._untold, kind = [], str(item.get("type"))
        if kind not in WORKS:
            return None
        name = str(item.get("tool")) if kind == "mcp_tool_call" else kind
        given = item.get("arguments", item.get("command", item.get("query")))
        ours = kind == "mcp_tool_call" and item.get("server", SERVER) == SERVER
        call = self._begun(item.get("id"), f"{OURS}{name}" if ours else name, given)
        if not done:
            return None
        self._items += 1
        told = [item.get(key) for key in RESULTS]
        text = "\n".join(_text(part) for part in told if part is not None)
        self._returned(call, text, item.get("status") == "failed")
        return self._stall.turn()

    def _begun(self, told: object, name: str, given: object) -> str:
        key = str(self.calls if told is None else told)
        if key not in self._made:
            arguments = given if isinstance(given, dict) else {"given": given}
            self._made[key] = Call(id=key, name=name, arguments=arguments)
            self.called[name] += 1
            shown = "" if given is None else _text(given)[:SHOWN]
            self._open[key] = f"{name.removeprefix(OURS)} {shown}"
        return key

    def _returned(self, key: str, text: str, failed: bool) -> None:
        call, known = self._made.get(key), self._open.pop(key, None)
        if call is None or known is None:
            return
        answer = Returned(id=key, text=text, is_error=failed)
        if call.name.startswith(OURS):
            self._stall.note(call, answer, made=True)
            self.rules += [rule for rule in broken_rules(text) if rule not in self.rules]
        else:  # its own tools may be asked the same again: files change, and a shell is waited for
            self._stall.heard(answer)


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _text(value: object) -> str:
    """The words of a result or an error; JSON where it has another shape."""
    if isinstance(value, dict):
        value = value.get("content") or value.get("message") or value.get("text") or value
    if isinstance(value, list) and all(isinstance(part, dict | str) for part in value):
        return "\n".join(_text(part) for part in value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _usage(told: object) -> Usage:
    """Tokens; what was read from a cache or into one counts as input."""
    if not isinstance(told, dict):
        return Usage()
    cached = ("cache_creation_input_tokens", "cache_read_input_tokens")
    read = (_number(told.get(name), 0) for name in ("input_tokens", *cached))
    return Usage(input=sum(read), output=_number(told.get("output_tokens"), 0))


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and value >= 0 else default
