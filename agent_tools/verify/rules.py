"""The rules that a candidate kernel is held to, and who watches each.

Every violation in a report names one of these ids; the red-team suite breaks each at least once
(`zm verify --rules` prints the table). ``static`` rules are read off the file before anything
runs: necessary, never sufficient. ``sandbox`` rules are enforced by the kernel of the operating
system or by the worker. ``compared`` rules are decided by the parent from raw tensors and its own
clock.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rule(id="import", watched="static", text="imports nothing but torch, triton, ...")."""

    id: str
    watched: Literal["static", "sandbox", "compared"]
    text: str


def _table(watched: Literal["static", "sandbox", "compared"], **texts: str) -> list[Rule]:
    return [
        Rule(id=name.replace("_", "-"), watched=watched, text=text) for name, text in texts.items()
    ]


_ALL = [
    *_table(
        "static",
        syntax="is one Python file of at most 200 kB that parses",
        entry="defines forward, and each backward of its contract, with the reference's signature",
        docstring="opens with a docstring, and so does each entry point",
        import_="imports nothing but torch, triton, math, typing and the like",
        reference="never reaches the contract's reference, other kernels, or the verifier",
        process="starts no process",
        thread="starts no thread",
        network="opens no connection",
        environment="neither reads nor writes the environment",
        file="opens no file",
        clock="neither reads nor patches a clock",
        patch="assigns to nothing outside itself: no attribute of torch or of another module",
        settings="changes no setting of torch: threads, determinism, default dtype, precision",
        reflection="looks at no frames, no garbage collector, no name with a leading underscore",
        code="builds no code at run time: eval, exec, compile, torch.compile",
        swallow="catches no exception",
        state="keeps nothing between calls: no global, no cache, no mutable default",
        deferred="returns plain tensors: no subclass, no hook, no lazy result",
        weights="holds no data of its own: no long literals",
        native="C++ of arithmetic only: listed includes, nothing declared that it does not define",
    ),
    *_table(
        "sandbox",
        load="loads and compiles",
        exception="raises on no case",
        crash="does not crash",
        time="answers in time",
        memory="stays within its memory",
        syscall="makes no system call a kernel has no need of (sockets, fork, exec, kill, mount)",
        runtime_ban="does at run time nothing that the static rules forbid in the file",
        protocol="leaves the worker alone: answers arrive as the worker writes them",
        background="does no work after it has returned",
    ),
    *_table(
        "compared",
        tensors="returns as many tensors as the reference, of its shapes and dtypes",
        alias="returns tensors of their own: not its input, not one tensor twice",
        inputs="leaves its inputs as they were",
        guard="writes only inside its outputs",
        unwritten="writes every element of its outputs",
        nonfinite="returns finite numbers where the reference does",
        bits="is bit-equal to the reference on every case",
        stale="depends on what its inputs hold now, not on where they lie or what was there before",
        memory_content="depends on nothing left in freed memory",
        order="gives the same bits in another order of calls and at another thread count",
        accuracy="is at most twice as far from fp64 as plain torch",
        gradient="has gradients that agree with fp64 autograd: no detached, zero or scaled one",
        launches="takes twice as long for twice as many launches",
        speed="reaches 70 % of the baseline's speed",
    ),
]  # fmt: skip

RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule(id=entry.id.rstrip("-"), watched=entry.watched, text=entry.text) for entry in _ALL
    )
}
