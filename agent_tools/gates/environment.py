"""C0: the set-up is what it says it is, and this very set-up sees one flipped bit.

Both engines must name the same weights, config, plan and contracts; every site is covered; every
contract in use is served by an implementation whose certificate holds here (the full gate runs the
sweep again and compares the outputs' digest); applying the plan must move a bit, or it is not in
force. Red controls: one weight bit, found by digest in its tensor and nowhere else, and one
activation bit, found at its site and nowhere else.
"""

import torch

from ...kernels import certificates, certify, dispatch
from ...kernels.contract import get_contract
from ...model_recipes.bindings import COPY, POINTWISE
from ...model_recipes.state import state_digest
from ...trainer.engines.base import SiteCall
from ..align import shorten
from ..flips import flipped_weight
from ..selftest import self_test
from ..sides import Runner, Side
from .base import Findings, Gate
from .bench import Bench, Quiet, compare_scored

SAME = (
    "model", "config_digest", "weights_digest", "weights_version", "dtype", "device", "threads",
    "plan_digest", "contracts", "python", "torch", "transformers", "zeromismatch",
)  # fmt: skip
BY_DEFINITION = frozenset((POINTWISE, COPY))


def check(bench: Bench, found: Findings) -> None:
    """See the module."""
    engines = bench.on()
    told = [engine.describe() for engine in (engines.paged, engines.packed)]
    odd = [name for name in SAME if told[0][name] != told[1][name]]
    found.part("both engines describe one set-up", len(SAME), len(odd), "fields", ", ".join(odd))
    for part in SHARED:
        part(bench, found)
    _alive(bench, found)
    _activation_bit(bench, found)


class Ran(Quiet):
    """Which operators ran, and by which contract."""

    def __init__(self) -> None:
        self.sites: set[tuple[str, str | None]] = set()

    def on_site(self, call: SiteCall, /) -> None:
        """Note it."""
        self.sites.add((call.site.name, call.site.contract))


def _alive(bench: Bench, found: Findings) -> None:
    """No plug-in carries the plan into the embedded engines: that it runs there is seen itself."""
    engines, few = bench.on(), bench.requests[:1]
    paged, packed = Ran(), Ran()
    engines.run("alone", few, paged)
    engines.pack(few, packed)
    odd = sorted(name for name, _ in paged.sites ^ packed.sites)
    found.part("the plan's operators run in both engines", len(paged.sites | packed.sites),
               len(odd), "sites", ", ".join(odd[:3]))  # fmt: skip


def _coverage(bench: Bench, found: Findings) -> None:
    instrument = bench.on().paged.instrument
    uncovered = instrument.audit.uncovered
    names = ", ".join(f"{entry.path} {entry.function}" for entry in uncovered[:3])
    found.part("every operator belongs to a site", len(instrument.sites), len(uncovered), "sites",
               names)  # fmt: skip
    stock = sum(site.contract is None for site in instrument.sites)
    if stock:
        found.notes.append(f"{stock} of {len(instrument.sites)} sites are stock and uncertified")


def _certificates(bench: Bench, found: Findings) -> None:
    sites = bench.on().paged.instrument.sites
    used = sorted({site.contract for site in sites if site.contract} - BY_DEFINITION)
    if not used:
        found.notes.append("the plan uses no contract, so no certificate was needed")
        return
    bad: list[str] = []
    for name in used:
        bench.progress(f"C0: certificate of {name}")
        contract, serving = get_contract(name), dispatch.choose(name)
        if serving.name == "reference":
            continue
        held = certificates.load(contract, serving, ())
        if held is None:  # replaced since this process started, by another version of the package
            held = certify.prove(contract, [serving], quick=True)[0]
            found.notes.append(f"{name}: no stored certificate for {serving.name}; proved again")
        if not held.admitted:
            bad.append(f"{name}: {serving.name} is not admitted: {held.reason}")
        elif not bench.quick:
            again = certify.prove(contract, [serving], quick=held.quick, seed=held.seed)[0]
            if not again.admitted or again.output_digest != held.output_digest:
                bad.append(f"{name}: the sweep gives another result now")
    detail = "; ".join(bad) or ("valid" if bench.quick else "valid, and repeated")
    found.part("contracts in use are certified here", len(used), len(bad), "contracts", detail)


def _plan_acts(bench: Bench, found: Findings) -> None:
    if bench.plan.is_stock:
        return
    bench.progress("C0: does the plan act?")
    moved = compare_scored(bench.packed, bench.stock_packed)
    found.require("applying the plan moves bits", f"{moved.differing} of {moved.compared} tokens",
                  moved.differing > 0)  # fmt: skip


def _weight_bit(bench: Bench, found: Findings) -> None:
    bench.progress("C0: one bit of one weight")
    module = bench.model.module
    before = state_digest(module)
    found.part("weights are what was loaded", len(before), _changed(before, bench), "tensors")
    name, tensor = max(module.named_parameters(), key=lambda entry: entry[1].numel())
    with torch.no_grad(), flipped_weight(module, name, tensor.numel() // 3):
        after = state_digest(module)
    placed = [key for key in before if before[key] != after[key]]
    found.control("one bit of one weight", f"1 bit of {name}", len(before), len(placed),
                  red=placed == [name])  # fmt: skip


def _changed(before: dict[str, str], bench: Bench) -> int:
    return sum(before[name] != digest for name, digest in bench.model.state_digest.items())


def _activation_bit(bench: Bench, found: Findings) -> None:
    bench.progress("C0: one bit of one activation")
    requests = shorten(bench.requests, 2, 4)
    bench.release()
    for side in ("paged:decode", "packed:packed"):
        runner = Runner(
            side=Side.parse(side), model=bench.model, requests=requests, plan=bench.plan
        )
        with runner.held(), runner.engine() as engine:
            runner.schedule = engine.schedule(runner.side.schedule, requests)
            tested = self_test(runner)
        found.control(f"one activation bit, {side}", tested.activation, 1, int(tested.passed),
                      red=tested.passed)  # fmt: skip


SHARED = (_coverage, _certificates, _plan_acts, _weight_bit)
"""What C0 checks whichever engine samples."""

GATE = Gate(
    id="C0",
    title="Environment",
    claim="Engines, weights, plan and certificates are what they say; one flipped weight bit is "
    "placed by digest, one flipped activation bit at its site.",
    check=check,
)
