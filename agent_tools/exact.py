"""Runs on inputs for which the order of a sum cannot matter: what still differs is not order.

Both sides run the same schedule again while every operator's output is replaced, after it was
digested, by a pattern that depends only on site, position and token. So every operator sees the
same, simple inputs: rows with a single number, for which each sum has one term. Attention needs
more care and gets two passes:

    equal keys     all keys are zero, so every weight is the same, and each value is a single 1, in
                   another column for every key head: an output counts the values read. A count
                   that is wrong by one means that other keys were read: stale or wrong state. A
                   padding row's values are enormous, so that reading one shows: padding read.
    two keys       all but the first two keys are far below them, weigh nothing and have no value,
                   so every sum has at most two terms. Another result means another scale,
                   exponential, division or mask: a rounding point.

    left, right = (traced(side, ExactInputs("equal keys", requests)) for side in sides)
    exact_probes("equal keys", Comparison(left, right))["model.layers.0.self_attn#attention"]

Layers that carry state get integers, no decay and unit strengths: k of row n is the unit vector n,
q reads the row half as far, Mamba-2 takes a step at position 0 only, so every sum is exact in any
order. A row that is off by a quarter was computed from other rows: stale or wrong state; by less,
a rounding point.

Where nothing differs on such inputs, the difference found on real ones is the order of a sum (for
an operator that sums; the others have only rounding points).
"""

import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..trainer.engines.base import Request, SiteCall
from .cause import COPY_CLASSES, SUMMING_CLASSES
from .compare import STATE_CLASSES, Comparison, SiteComparison
from .records import Probe
from .trace import OUTPUT, ColumnKey, Keep, Tracer

Pass = Literal["equal keys", "two keys"]
PASSES: tuple[Pass, ...] = ("equal keys", "two keys")

UNTOUCHED_CLASSES = frozenset({"rotary_table", "logprob", "topk"})  # a choice is no pattern
CARRYING_CLASSES = STATE_CLASSES - {"attention"}
FAR = 0.25
FAR_BELOW = -3e4
PADDING_VALUE = 2.0**20
HEAD_STRIDE = 7
MEMORY_BYTES = 500_000_000


class ExactInputs:
    """Observer that digests every output and then puts a pattern in its place.

    keep: sites whose outputs are kept as tensors (attention, to see by how much a count is wrong).
    """

    def __init__(
        self, keys: Pass, requests: Sequence[Request], keep: frozenset[str] = frozenset()
    ) -> None:
        self.tracer = Tracer(keep=Keep(sites=keep), disk_bytes=MEMORY_BYTES)
        self._keys = keys
        self._tokens = {request.id: request.tokens for request in requests}
        self._position = np.empty(0, np.int64)
        self._seed = np.empty(0, np.int64)
        self._padding = np.empty(0, np.bool_)

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        """The engine says whose rows the next calls hold."""
        self.tracer.begin_rows(step, rows)
        self._position = np.asarray([max(position, 0) for _, position in rows], np.int64)
        self._padding = np.asarray([not name for name, _ in rows], np.bool_)
        tokens = [self._tokens[name][position] if name else 0 for name, position in rows]
        self._seed = self._position * 7919 + np.asarray(tokens, np.int64) * 31

    def on_site(self, call: SiteCall, /) -> Tensor | None:
        """Record, then answer with the pattern."""
        self.tracer.record(call)
        if call.site.op_class in UNTOUCHED_CLASSES:
            return None
        if call.site.op_class == "kv_write":
            return self._keys_and_values(call)
        carried = self._carried(call)
        if carried is not None:
            return carried
        output = torch.zeros_like(call.output, memory_format=torch.contiguous_format)
        if call.site.op_class == "rotary":
            sizes = torch.from_numpy(1.0 + self._seed % 97).to(output)
            output[..., 0] = sizes.view(-1, *[1] * (output.dim() - 2))
        elif call.site.op_class != "lm_head":
            self._set_one_term(output, call.site.name)
        return output

    def _carried(self, call: SiteCall) -> Tensor | None:
        """What goes into a convolution's successors and into recurrences: integers, no decay."""
        output, position = call.output, torch.from_numpy(self._position).to(call.output.device)
        if call.site.op_class == "decay":
            return torch.zeros_like(output)
        if call.site.op_class == "convolution":
            sizes = torch.from_numpy(1 + self._seed % 3).to(output)
            return sizes[:, None].expand_as(output).contiguous()
        if call.site.op_class == "time_step":
            return (position == 0).to(output)[:, None].expand_as(output).contiguous()
        if call.site.op_class == "discretised":
            x, dt = call.inputs["x"].float(), call.inputs["dt"].float()
            return torch.cat([x * dt[..., None], -dt[..., None]], dim=-1).to(output)
        if call.site.part == "beta":
            return torch.ones_like(output)
        if call.site.part in ("q_norm", "k_norm"):
            row = position if call.site.part == "k_norm" else position // 2
            unit = torch.nn.functional.one_hot(row % output.shape[-1], output.shape[-1])
            return unit.to(output)[:, None].expand_as(output).contiguous()
        return None

    def _set_one_term(self, output: Tensor, name: str) -> None:
        """Another column at each of a convolution's taps, so that its sums have one term, too."""
        flat = output.view(len(output), -1)
        seed = self._seed + zlib.crc32(name.encode())
        terms = torch.from_numpy(0.5 + (seed * 2654435761 % 2**23) / 2**24).to(flat)
        place = self._position * 7919 + zlib.crc32(name.encode())
        columns = torch.from_numpy(place % flat.shape[1]).to(flat.device)
        flat.scatter_(1, columns[:, None], terms[:, None])

    def _keys_and_values(self, call: SiteCall) -> Tensor:
        output = torch.zeros_like(call.output, memory_format=torch.contiguous_format)
        keys, values = output.chunk(2, dim=1)
        device = output.device
        heads = torch.arange(values.shape[1], device=device)
        columns = torch.from_numpy(self._seed).to(device)[:, None] + HEAD_STRIDE * heads
        values.scatter_(2, (columns % values.shape[2])[..., None], 1.0)
        values[torch.from_numpy(self._padding).to(device)] *= PADDING_VALUE
        if self._keys == "two keys":
            position = torch.from_numpy(self._position).to(device)
            levels = torch.tensor([0.0, -1.0, FAR_BELOW], dtype=keys.dtype, device=device)
            keys[:, :, 0] = levels[position.clamp(max=2)][:, None]
            values[position >= 2] = 0.0
        return output


def exact_probes(name: Pass, comparison: Comparison) -> dict[str, Probe]:
    """What one pass says about every site that computes something."""
    sites = (site for site in comparison.sites if site.op_class not in COPY_CLASSES)
    return {site.site: _probe(name, comparison, site) for site in sites}


def _probe(name: Pass, comparison: Comparison, site: SiteComparison) -> Probe:
    label = f"exact sums, {name}" if site.op_class == "attention" else "exact sums"
    if not site.compared:
        return Probe(name=label, result="no row had equal inputs on both sides")
    if site.op_class in CARRYING_CLASSES:
        far = _far_apart(comparison, site)
        result = f"{site.affected} of {site.compared} rows differ where every sum is exact"
        if far:
            result += f", {far} of them by a quarter or more"
            return Probe(name=label, result=result, decided="stale or wrong state")
        return Probe(name=label, result=result, decided="rounding point" if site.affected else None)
    if site.op_class != "attention":
        result = f"{site.affected} of {site.compared} rows differ where each sum has one term"
        return Probe(name=label, result=result, decided="rounding point" if site.affected else None)
    if name == "two keys":
        result = f"{site.affected} of {site.compared} rows differ where two keys have weight"
        return Probe(name=label, result=result, decided="rounding point" if site.affected else None)
    wrong, padding = _wrong_counts(comparison, site)
    result = (
        f"{site.affected} of {site.compared} rows differ where the output counts the values read, "
        f"{wrong} of them by at least one value"
    )
    if padding:
        result += f", {padding} by the value of a padding row"
        return Probe(name=label, result=result, decided="padding read")
    if wrong:
        return Probe(name=label, result=result, decided="stale or wrong state")
    return Probe(name=label, result=result, decided="rounding point" if site.affected else None)


def _differing(comparison: Comparison, site: SiteComparison) -> tuple[Tensor, Tensor] | None:
    """fp64 [rows, values] of both sides at the rows that convict, where they were kept."""
    key = ColumnKey(site.site, site.call, OUTPUT)
    sides = comparison.left.blobs.get(key), comparison.right.blobs.get(key)
    where = np.flatnonzero(site.convicting)
    if sides[0] is None or sides[1] is None or not len(where):
        return None
    left = sides[0].tensor[torch.from_numpy(where)].double().flatten(1)
    return left, sides[1].tensor[torch.from_numpy(site.output.right[where])].double().flatten(1)


def _far_apart(comparison: Comparison, site: SiteComparison) -> int:
    """Rows with a value that is off by a quarter of itself, or not finite on one side."""
    both = _differing(comparison, site)
    if both is None:
        return 0
    left, right = both
    near = (left - right).abs() < FAR * torch.maximum(left.abs(), right.abs())
    return int((~near & (left != right)).any(1).sum())


def _wrong_counts(comparison: Comparison, site: SiteComparison) -> tuple[int, int]:
    """Rows whose outputs are so far apart that another set of values must have been read.

    The second number counts those that can only have read a padding row.
    """
    both = _differing(comparison, site)
    if both is None:
        return 0, 0
    left, right = both
    where = np.flatnonzero(site.convicting)
    keys = comparison.left.table.position[site.rows[where]] + 1.0
    apart = (left - right).abs().amax(1) * torch.from_numpy(keys)
    return int((apart > 0.25).sum()), int((apart > PADDING_VALUE / 2).sum())


def order_is_left(op_class: str, probes: Sequence[Probe]) -> Probe | None:
    """The conclusion when every exact-sum probe ran and none found a difference."""
    exact = [probe for probe in probes if probe.name.startswith("exact sums")]
    needed = len(PASSES) if op_class == "attention" else 1
    ran = [probe for probe in exact if "no row" not in probe.result]
    if len(ran) < needed or any(probe.decided for probe in exact):
        return None
    if op_class in SUMMING_CLASSES:
        return Probe(
            name="order",
            result="the difference vanishes on inputs whose sums are exact in any order",
            decided="reduction order",
        )
    return Probe(
        name="no sum",
        result=f"{op_class} sums nothing, so only its roundings can differ",
        decided="rounding point",
    )
