"""C7 and C8: weights that move. From the trainer into the rollout engine, to disk and back.

C7 takes one optimiser step on a trainer's copy of the model, publishes into the rollout engine, and
lets it work: every tensor has the trainer's digest at the address it had before, tied tensors are
still one, the first rollout after it equals the trainer on every token (so no packed copy and no
cached key survived), and a publication that is partial, repeated, old or foreign is refused with
nothing changed. C8 exports and loads again, and resumes training from a checkpoint: weights and
optimiser state end with the bits of the uninterrupted run. Red controls: one tensor that was not
published; the optimiser's memory of one tensor lost.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ...kernels import bits
from ...kernels.attention import PAGE
from ...kernels.errors import ZeroMismatchError
from ...model_recipes.checkpoint import load_checkpoint, quiet_transformers
from ...model_recipes.models import LoadedModel
from ...model_recipes.state import aliases, named_state, state_digest, weights_root
from ...trainer.engines.base import Hit, Request, Schedule, Slice, Step
from ..anchor import addresses
from ..rollouts import compare_tokens
from .base import Findings, Gate
from .bench import Bench, Engines, compare_scored, engines_on, only
from .gradient import loss_weights
from .inference import grain
from .learner import Learner

Publisher = Callable[[Mapping[str, Tensor], int], None]

RATES = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Learning rates at which a step of AdamW changes every tensor, whatever its scale."""
GROWTH = 1.0 + 2.0**-6


def check_update(bench: Bench, found: Findings) -> None:
    """C7."""
    bench.progress("C7: one optimiser step")
    rollout, trainer = bench.fresh(), bench.fresh()
    rate = RATES[bench.model.dtype]
    engines, learner = engines_on(rollout, bench.plan), Learner(trainer, bench.plan, rate)
    paged = engines.paged
    requests = bench.learned
    before, places = state_digest(rollout.module), addresses(rollout)
    paged.generate(bench.prompts[:2], bench.policy())  # leaves caches and packed weights behind
    learner.step(requests, loss_weights(requests, bench.seed))
    wanted = named_state(trainer.module)
    _refusals(found, paged.publish, rollout, wanted, version=1)
    bench.progress("C7: publish, then the first rollout step")
    paged.publish(wanted, version=1)
    digests, arrived = state_digest(trainer.module), state_digest(rollout.module)
    odd = [name for name in digests if arrived[name] != digests[name]]
    found.part("every tensor's digest", len(digests), len(odd), "tensors", ", ".join(odd[:3]))
    moved = [name for name, place in addresses(rollout).items() if places[name] != place]
    found.part("every storage address", len(places), len(moved), "tensors", ", ".join(moved[:3]))
    own, theirs = _derived(rollout), _derived(trainer)
    if own:
        stale = [name for name in own if own[name] != theirs.get(name)]
        found.part("derived tensors' digests", len(own), len(stale), "tensors",
                   ", ".join(stale[:3]))  # fmt: skip
    tied = aliases(trainer.module)
    if tied:
        broken = sum(aliases(rollout.module).get(name) != rest for name, rest in tied.items())
        found.part("tied tensors are one", len(tied), broken, "tensors")
    trained = [name for name, _ in trainer.module.named_parameters() if name in arrived]
    changed = sum(before[name] != arrived[name] for name in trained)
    found.require("the step changed the tensors", f"{changed} of {len(trained)}",
                  changed == len(trained) > 0)  # fmt: skip
    sampled = paged.generate(bench.prompts, bench.policy())
    scored = learner.engines.pack(sampled.requests)
    found.tokens("first rollout after publishing = trainer", compare_tokens(sampled, scored))
    versions = {sample.version for sample in sampled.samples}
    found.require("tokens carry the new version", sorted(versions), versions == {1})
    _refusals(found, paged.publish, rollout, wanted, version=1, repeated=True)
    _stale_state(engines, found, sampled.requests[0], wanted)
    _unpublished(found, rollout, learner)


def _derived(model: LoadedModel) -> dict[str, str]:
    """Digests of the buffers, persistent or not."""
    buffers = model.module.named_buffers()
    return {name: bits.digest_tensor(tensor.reshape(1, -1)) for name, tensor in buffers}


def _refusals(
    found: Findings,
    publish: Publisher,
    model: LoadedModel,
    weights: Mapping[str, Tensor],
    *,
    version: int,
    repeated: bool = False,
) -> None:
    """Publications that must be refused, and must leave every tensor as it was."""
    first, *rest = weights
    poisoned = dict(weights)
    poisoned[first] = torch.full_like(weights[first], float("nan"))
    bad: dict[str, Mapping[str, Tensor]] = (
        {"repeated": weights}
        if repeated
        else {
            "partial": {name: weights[name] for name in rest},
            "with a foreign tensor": {**weights, "model.other.weight": weights[first]},
            "of another shape": {**weights, first: weights[first][:-1]},
            "with NaN": poisoned,
        }
    )
    root = weights_root(state_digest(model.module))
    accepted = [name for name, each in bad.items() if not _refused(publish, each, version)]
    if weights_root(state_digest(model.module)) != root:
        accepted.append("a refused one, in part")
    what = "repeated publication refused" if repeated else "partial or foreign publication refused"
    found.part(what, len(bad), len(accepted), "publications", ", ".join(accepted))


def _refused(
    publish: Publisher,
    weights: Mapping[str, Tensor],
    version: int,
) -> bool:
    try:
        publish(weights, version)
    except ZeroMismatchError:
        return True
    return False


def _stale_state(
    engines: Engines, found: Findings, one: Request, weights: Mapping[str, Tensor]
) -> None:
    """A publication between two steps: cached keys are gone, and hits on them are refused."""
    size = grain(engines)
    half, stop = max(size, 2 * PAGE // size * size), len(one.tokens)
    part = Step(slices=(Slice(request=one.id, start=0, stop=half),))
    other = {name: tensor * GROWTH for name, tensor in weights.items()}
    event = engines.paged.stage(other, engines.paged.version + 1)
    stale = Schedule(events=(part, event, Hit(request=one.id, source=one.id, upto=half)))
    try:
        engines.run(stale, [one])
        accepted = 1
    except ZeroMismatchError:
        accepted = 0
    found.part("a hit on keys from before the publication is refused", 1, accepted, "schedules")
    whole = Step(slices=(Slice(request=one.id, start=0, stop=stop),))
    after = engines.run(Schedule(events=(part, event, whole)), [one])
    found.tokens("published in mid-request, then whole = whole",
                 compare_scored(engines.run("alone", [one]), after))  # fmt: skip
    engines.paged.publish(weights, engines.paged.version + 1)


def _unpublished(found: Findings, rollout: LoadedModel, learner: Learner) -> None:
    """Red control: one small tensor misses the publication."""
    state = named_state(rollout.module)
    name = min(state, key=lambda each: state[each].numel())
    with torch.no_grad():
        bits.int_view(state[name]).view(-1)[0] ^= 1
    ours, theirs = state_digest(rollout.module), state_digest(learner.model.module)
    odd = [each for each in ours if ours[each] != theirs[each]]
    found.control("one bit of one tensor not published", f"1 bit of {name}", len(ours), len(odd),
                  red=odd == [name])  # fmt: skip
    with torch.no_grad():
        bits.int_view(state[name]).view(-1)[0] ^= 1


def check_persistence(bench: Bench, found: Findings) -> None:
    """C8."""
    with tempfile.TemporaryDirectory(prefix="zm-gate-") as folder:
        _export(bench, found, Path(folder) / "export")
        _resume(bench, found, Path(folder) / "checkpoint.pt")


def _export(bench: Bench, found: Findings, folder: Path) -> None:
    bench.progress("C8: export and load again")
    model = bench.fresh()
    with quiet_transformers():
        cast(Any, model.module).save_pretrained(folder)
    again = load_checkpoint(folder, dtype=model.dtype).to(model.device)
    wanted, got = state_digest(model.module), state_digest(again)
    odd = [name for name, digest in wanted.items() if got.get(name) != digest]
    found.part("exported and loaded, by digest", len(wanted), len(odd), "tensors",
               ", ".join(odd[:3]))  # fmt: skip
    loaded = replace(model, spec=bench.model.spec, module=again, config=again.config)
    requests = bench.requests[:4]
    engines = engines_on(loaded, bench.plan)
    found.tokens("exported and loaded, by logprob",
                 compare_scored(engines.pack(requests), only(bench.packed, requests)))  # fmt: skip
    places = {
        tensor.data_ptr() for m in (model.module, again) for tensor in named_state(m).values()
    }
    found.require("two copies in memory", f"{len(places)} tensors", len(places) == 2 * len(wanted))
    engines.paged.close()


def _resume(bench: Bench, found: Findings, file: Path) -> None:
    bench.progress("C8: resume from a checkpoint")
    requests = bench.learned
    rate = RATES[bench.model.dtype]
    steps = max(2, bench.size.training_steps)
    half = steps // 2
    batches = [requests[turn % len(requests) :][:1] for turn in range(steps)]
    whole = Learner(bench.fresh(), bench.plan, rate)
    for turn, batch in enumerate(batches):
        if turn == half:
            whole.save(file)
        whole.step(batch, loss_weights(batch, turn))
    wanted = whole.digests()
    whole.close()

    other = Learner(bench.fresh(), bench.plan, rate)

    def resumed(forget: bool) -> dict[str, str]:
        other.load(file)
        if forget:
            other.forget_smallest()
        for turn in range(half, steps):
            other.step(batches[turn], loss_weights(batches[turn], turn))
        return other.digests()

    got = resumed(forget=False)
    odd = [name for name, digest in wanted.items() if got.get(name) != digest]
    found.part(f"{steps} steps = {half}, checkpoint, {steps - half} more", len(wanted), len(odd),
               "tensors of model and optimiser", ", ".join(odd[:3]))  # fmt: skip
    lost = resumed(forget=True)
    other.close()
    red = sum(lost.get(name) != digest for name, digest in wanted.items())
    found.control(
        "the optimiser's memory of the smallest tensor lost", "1 tensor", len(wanted), red
    )
    found.require("updates after the checkpoint", steps - half)


UPDATE = Gate(
    id="C7",
    title="Update",
    claim="After an optimiser step and a publication the rollout engine holds and computes the "
    "trainer's weights, in place; a partial or repeated publication is refused.",
    check=check_update,
)
PERSISTENCE = Gate(
    id="C8",
    title="Persistence",
    claim="Exported and loaded weights give the same bits; a resumed run equals the uninterrupted "
    "one bit for bit.",
    check=check_persistence,
)
