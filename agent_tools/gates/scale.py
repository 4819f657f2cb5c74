"""C9: as large as it is used, and nothing that was not claimed.

Full depth (every layer of the config runs), a context many times longer than a KV page, in chunks
and decoded, against the trainer's packed forward; and whatever no recipe here claims (layouts over
several ranks, compiled and captured steps, adapters, forced choices, unknown settings) is refused
before any work. Red control: one bit of one row of the long request.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...kernels.attention import PAGE
from ...kernels.errors import ZeroMismatchError
from ...trainer.engines.admission import max_length
from ...trainer.engines.base import (
    Layout,
    Request,
    Sampling,
    Scenario,
    Schedule,
    Setting,
    Slice,
    Step,
)
from .base import Findings, Gate
from .bench import Bench, compare_scored
from .inference import TILES, grain, planted_bit

TAIL = 12
CHUNKS = (128, 97)


def check(bench: Bench, found: Findings) -> None:
    """See the module."""
    engines = bench.on()
    inside = (site.path.split(".layers.", 1)[1:] for site in engines.paged.instrument.sites)
    layers = len({rest[0].partition(".")[0] for rest in inside if rest})
    depth = bench.model.config.num_hidden_layers
    found.require("layers that run of layers in the config", f"{layers} of {depth}",
                  layers == depth)  # fmt: skip
    size = grain(engines)
    length = max(bench.size.long, TILES * size + TAIL)
    long = long_request(bench.requests, min(length, max_length(bench.model.config)))
    bench.progress(f"C9: {len(long.tokens)} tokens")
    what = "pages" if size == PAGE else f"state chunks of {size}"
    found.require(f"context of more than {TILES} {what}", f"{len(long.tokens)} tokens",
                  len(long.tokens) > TILES * size)  # fmt: skip
    packed = engines.pack([long])
    for size in CHUNKS:
        run = engines.run(_prefill(long, size), [long])
        name = f"{len(long.tokens)} tokens, chunks of {size}, last {TAIL} decoded = packed"
        found.tokens(name, compare_scored(run, packed))
    _refusals(bench, found, long)
    bench.progress("C9: red control, one bit of one row")
    flip = planted_bit(engines, long)  # bf16 hides what stock attention does to so few tokens
    control = compare_scored(engines.run(_prefill(long, CHUNKS[1]), [long], flip), packed)
    found.require("the control's row was disturbed", flip.flips)
    found.control("one bit of one row", f"1 of {len(long.tokens)} rows", control.compared,
                  control.differing)  # fmt: skip
    found.not_applicable += [
        "CUDA graphs = eager: there are none on a CPU",
        "compiled = eager: no recipe claims compiled steps; they are refused",
        "layouts over several ranks: no recipe claims one; they are refused",
    ]


def long_request(requests: Sequence[Request], length: int) -> Request:
    """All requests' tokens in a row, repeated to ``length``."""
    row = [token for request in requests for token in request.tokens]
    tokens = (row * (-(-length // len(row))))[:length]
    return Request(
        id="long",
        tokens=tuple(tokens),
        sampled_mask=(False,) * (length - TAIL) + (True,) * TAIL,
        sampling=Sampling(),
    )


def _prefill(long: Request, size: int) -> Schedule:
    stop = len(long.tokens) - TAIL
    bounds = [(at, min(at + size, stop)) for at in range(0, stop, size)]
    bounds += [(at, at + 1) for at in range(stop, len(long.tokens))]
    pieces = (Slice(request=long.id, start=start, stop=end) for start, end in bounds)
    return Schedule(events=tuple(Step(slices=(piece,)) for piece in pieces))


def _refusals(bench: Bench, found: Findings, long: Request) -> None:
    whole = Slice(request=long.id, start=0, stop=len(long.tokens))
    plain = Scenario(
        model=bench.model.spec,
        plan=bench.plan.name,
        requests=(long,),
        schedule=Schedule(events=(Step(slices=(whole,)),)),
    )
    layouts = (
        Layout(tp=2), Layout(ep=2), Layout(dp=2), Layout(cp=2), Layout(pp=2), Layout(fsdp=2),
    )  # fmt: skip
    wrong = {str(layout): replace(plain, layout=layout) for layout in layouts}
    for mode in ("graph", "compiled"):
        events = (Step(slices=(whole,), mode=mode),)
        wrong[f"mode {mode}"] = replace(plain, schedule=Schedule(events=events))
    wrong["an unknown setting"] = replace(
        plain, settings={"kv_cache_dtype": Setting(value="fp8", effect_proven=False)}
    )
    wrong["an adapter"] = replace(plain, requests=(replace(long, adapter="lora"),))
    wrong["forced choices"] = replace(plain, requests=(replace(long, forced={"router": (1,)}),))
    engines = bench.on()
    accepted = [
        f"{engine.name}: {name}"
        for engine in (engines.paged, engines.packed)
        for name, scenario in wrong.items()
        if not _refused(engine.run, scenario)
    ]
    found.part("what is not claimed is refused", 2 * len(wrong), len(accepted), "scenarios",
               ", ".join(accepted[:3]))  # fmt: skip


def _refused(run: Callable[[Scenario], object], scenario: Scenario) -> bool:
    try:
        run(scenario)
    except ZeroMismatchError:
        return True
    return False


GATE = Gate(
    id="C9",
    title="Scale",
    claim="Full depth and long context give the same bits; layouts, modes and settings that are "
    "not claimed are refused at start.",
    check=check,
)
