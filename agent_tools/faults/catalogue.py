"""The catalogue: every fault, where it comes from, and what must name it.

    fault_named("M06")     ->  Fault(id="M06", op_class="attention", cause="stale or wrong state")
    plant("M06", model)    ->  a context manager

``by`` says how a fault must be found: ``operator`` (localizer: class and cause), ``anchor``
(localizer: MISALIGNED, by what), ``published`` (the same, after new weights were published to both
sides), ``moved`` (storage addresses before and after a publication), ``sampled`` (the anchor, on a
rollout that samples), ``refused`` (an action that the engine must refuse), ``certified`` (the sweep
that admits kernels, and why it refused this one).
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...kernels.errors import UsageError
from ...model_recipes.bindings import device_kind, dtype_name
from ...model_recipes.models import LoadedModel
from ...model_recipes.rotary_table import RotaryTable
from ...trainer.engines import execution, packed, paged_batch, recurrent_batch
from ...trainer.engines.base import Step
from ..records import CauseName
from . import attention, engines, operators, recurrent
from .engines import Planting
from .kernels import KERNELS
from .mechanism import Wrap, faulty_kernel
from .sweep import contract_of, planted_in

By = Literal["operator", "anchor", "published", "moved", "sampled", "refused", "certified"]

NORM = "model.layers.1.input_layernorm"
DOWN = "model.layers.0.mlp.down_proj"
OUT = "model.layers.1.self_attn.o_proj"
CHUNKS = ("paged:chunk:7", "packed:packed")
ROWS = ("paged:chunk:1", "packed:packed")
DECODE = ("paged:decode", "packed:packed")
HITS = ("paged:prefix-hit", "packed:packed")
PADDED = ("paged:fuzz:2", "packed:packed")
TINY = "tiny:llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. ``expect``: what must be named where no operator is at fault.

    Fault(id="B01", line="RMSNorm sums in an order that follows the row count", source="...",
          by="operator", op_class="rmsnorm", cause="reduction order", site="model.layers.1...",
          sides=("paged:chunk:7", "packed:packed"), planting=...)
    """

    id: str
    line: str
    source: str
    by: By
    planting: Planting
    op_class: str | None = None
    cause: CauseName | None = None
    site: str | None = None
    """The one operator that holds it; None: every operator of the class."""
    expect: str | None = None
    """The anchor's word, the refused action, or the contract's operator."""
    sides: tuple[str, str] = CHUNKS
    """Sides that show it."""
    fact: str | None = None
    """What the pattern of affected rows must say."""
    model: str = TINY
    """The reduced model that has such an operator."""

    @property
    def expected(self) -> str:
        """Who must name it, in a few words."""
        if self.by == "operator":
            return f"{self.op_class}: {self.cause}"
        return f"{self.by}: {self.expect}" + (f": {self.cause}" if self.cause else "")


def _at(op_class: str, wrap: Callable[[], Wrap], path: str | None = None) -> Planting:
    def planted(model: LoadedModel) -> contextlib.AbstractContextManager[None]:
        return faulty_kernel(model, op_class, wrap(), path=path)

    return planted


def _operator(
    name: str, line: str, source: str, op_class: str, cause: CauseName, *,
    site: str | None = None, sides: tuple[str, str] = CHUNKS, fact: str | None = None,
) -> Fault:  # fmt: skip
    """A fault of a kernel, which ``kernels.py`` has."""
    return Fault(
        id=name, line=line, source=source, by="operator", op_class=op_class, cause=cause,
        site=site, sides=sides, fact=fact, planting=_at(op_class, KERNELS[name], site),
    )  # fmt: skip


def _table(model: LoadedModel) -> contextlib.AbstractContextManager[None]:
    def change(right: Any, running: bool) -> Any:
        def table(*given: Any, **more: Any) -> Any:
            return operators.bf16_table(right(*given, **more))

        return table if running else right

    return engines.while_decoding(RotaryTable, "__call__", change)


def _boundaries(model: LoadedModel) -> contextlib.AbstractContextManager[None]:
    def change(right: Any, running: bool) -> Any:
        return lambda batch, *given, **more: right(attention.one_sequence(batch), *given, **more)

    return engines.while_decoding(packed.PackedBatch, "attend", change)


def _padding(model: LoadedModel) -> contextlib.AbstractContextManager[None]:
    def change(right: Any, running: bool) -> Any:
        def context(step: Step, *given: Any) -> Any:
            found = right(step, *given)
            return replace(found, batch=attention.padding_over_page(step, found.batch))

        return context

    return engines.while_decoding(execution, "paged_batch", change)


def _eight_bits(model: LoadedModel) -> contextlib.AbstractContextManager[None]:
    def change(right: Any, running: bool) -> Any:
        return lambda cache, k, v, slot: right(cache, *attention.eight_bit_rows(k, v), slot)

    return engines.while_decoding(paged_batch, "write_kv", change)


def _step_by_step(model: LoadedModel) -> contextlib.AbstractContextManager[None]:
    def change(right: Any, running: bool) -> Any:
        return recurrent.step_by_step if running else right

    return engines.while_decoding(recurrent_batch.PagedState, "recur", change)


def _certified(name: str, line: str, source: str, op: str, cause: CauseName) -> Fault:
    """A fault of a kernel that ``sweep.py`` has."""

    def planted(model: LoadedModel) -> contextlib.AbstractContextManager[None]:
        kind = dtype_name(model.dtype), device_kind(model.device)
        return planted_in(name, contract_of(op, *kind))

    return Fault(
        id=name, line=line, source=source, by="certified", expect=op, cause=cause, planting=planted
    )


_BY_KERNEL = (
    _operator("B01", "RMSNorm sums in an order that follows the row count", "vllm #48271",
              "rmsnorm", "reduction order", site=NORM),
    _operator("B02", "a product's tile follows the launch", "vllm #55131",
              "linear", "reduction order", site=DOWN),
    _operator("B03", "fp32 inputs read as TF32 in large launches", "batch_invariant_ops #23",
              "linear", "intermediate dtype", site=DOWN,
              sides=("paged:alone", "packed:packed")),
    _operator("B04", "one quantisation scale for the whole batch", "vllm #57016",
              "linear", "batch leak", site=DOWN),
    _operator("B05", "the stock product depends on the number of rows", "pytorch #136338",
              "linear", "reduction order", site=OUT),
    _certified("B06", "each thread sums its part of a row", "pytorch #88718",
               "rmsnorm", "reduction order"),
    _operator("B08", "the number of KV splits follows the whole batch", "flash-attention #1897",
              "attention", "reduction order", sides=DECODE),
    _operator("B10", "timing chooses the tile", "triton #9368",
              "linear", "nondeterminism", site=DOWN),
    _operator("P01", "decode takes a larger KV tile than prefill", "sglang #25790",
              "attention", "reduction order", sides=ROWS,
              fact="(a tile border)"),
    Fault(id="P03", line="trainer chunked, engine recurrent", source="prime-rl PR #3214",
          by="operator", op_class="recurrence_gated_delta", cause="reduction order",
          sides=DECODE, planting=_step_by_step, model="tiny:qwen3_next"),
    Fault(id="P05", line="packed boundaries overwritten by a mask's", by="operator",
          source="flash-linear-attention #838", op_class="attention",
          cause="stale or wrong state", sides=("packed:packed", "paged:alone"),
          planting=_boundaries),
    _operator("C02", "a cache hit takes another attention path", "sglang #34683",
              "attention", "reduction order", sides=HITS),
    _operator("W01t", "a graph reads the page table of its capture", "vllm-ascend PR #7473",
              "attention", "stale or wrong state", sides=ROWS),
    Fault(id="Q01", line="decoded keys are kept in eight bits", source="sglang PR #31086",
          by="operator", op_class="kv_write", cause="intermediate dtype", sides=DECODE,
          planting=_eight_bits),
    _operator("R01", "the order of a sum over shards follows the message size", "sglang PR #34159",
              "linear", "reduction order", site=OUT),
    _operator("L04", "bf16 logits on one side only", "OpenRLHF PR #634",
              "lm_head", "intermediate dtype"),
    Fault(id="K07", line="a padding row is written over a key", source="transformers #29029",
          by="operator", op_class="attention", cause="padding read", sides=PADDED,
          planting=_padding),
    Fault(id="M04", line="the rotary table was cast to bf16", source="transformers #25681",
          by="operator", op_class="rotary_table", cause="intermediate dtype", planting=_table),
    _operator("M06", "query heads read the wrong key head", "FreeToken PR #177",
              "attention", "stale or wrong state", sides=DECODE),
    _certified("T01", "equal scores: whichever expert comes first", "torchtitan #3336",
               "topk", "tie-break"),
    _certified("T02", "grouped top-k prefers the later of two equals", "vllm PR #55514",
               "topk", "tie-break"),
    _certified("R03", "expert outputs added in the order of their ranks", "vllm PR #45683",
               "combine", "reduction order"),
    _certified("G01", "the gradient adds parts in any order", "flash-attention #414",
               "linear_grad_input", "nondeterminism"),
    _certified("G03", "the norm's weight counts twice in dX", "Megatron-LM PR #6859",
               "rmsnorm_grad", "wrong formula"),
)  # fmt: skip


def _anchor(
    name: str, line: str, source: str, expect: str, planting: Planting, by: By = "anchor",
    sides: tuple[str, str] = ("paged:mixed", "packed:packed"),
) -> Fault:  # fmt: skip
    return Fault(
        id=name, line=line, source=source, by=by, expect=expect, planting=planting, sides=sides
    )


_BY_ENGINE = (
    _anchor("L01", "logprob before temperature", "trl #4159", "inputs",
            engines.on_targets(engines.without_temperature)),
    _anchor("L02", "logprob divided by the temperature", "prime-rl PR #697", "logprobs",
            engines.on_run(engines.divided_by_temperature)),
    _anchor("L05", "the shape fits, the token does not", "torchtitan PR #3629", "inputs",
            engines.on_targets(engines.of_the_next_candidate)),
    _anchor("L07", "positive logprobs", "verl #2656", "logprobs",
            _at("logprob", lambda: operators.positive_logprob)),
    _anchor("K01", "ids decoded to text and encoded again", "trl #5224", "tokens",
            engines.on_run(engines.encoded_again)),
    _anchor("K03", "response slice from the wrong end", "verl PR #5115", "logprobs",
            engines.on_run(engines.from_the_wrong_end)),
    _anchor("K05", "end token appended with logprob 0", "SkyRL PR #758", "logprobs",
            engines.on_run(engines.ended_by_hand), "sampled"),
    _anchor("N01", "null on the wire becomes NaN", "trl PR #6693", "logprobs",
            engines.on_run(engines.null_becomes_nan)),
    _anchor("C01", "logprobs of cached positions from an old buffer", "vllm #42019", "logprobs",
            engines.on_run(engines.from_an_old_buffer), sides=HITS),
    _anchor("C05", "keys from before a publication are served", "NeMo-RL PR #4018",
            "a hit across a publication", engines.stale_prefixes, "refused"),
    _anchor("S02", "version counted up, weights never arrived", "trl PR #5932", "weights",
            engines.on_install(engines.nothing_arrives), "published"),
    _anchor("W01", "a derived buffer is made anew, a graph keeps the old one",
            "vllm-ascend PR #7473", "model.rotary_emb.inv_freq", engines.buffer_made_anew, "moved"),
    _anchor("W04", "the second chunk restores the first", "SkyRL #1680", "weights",
            engines.on_install(engines.second_chunk_restores), "published"),
    _anchor("W05", "missing names are only logged", "sglang PR #9663", "a partial publication",
            engines.missing_names_logged, "refused"),
    _anchor("W06", "a tied head loaded as a second tensor", "vllm PR #51665", "weights",
            engines.untied_head, "published"),
)  # fmt: skip

FAULTS: dict[str, Fault] = {fault.id: fault for fault in (*_BY_KERNEL, *_BY_ENGINE)}


def fault_named(name: str) -> Fault:
    """The fault of that id; UsageError lists them."""
    if name not in FAULTS:
        raise UsageError(f"no fault is called {name!r}; use one of {', '.join(FAULTS)}")
    return FAULTS[name]


def plant(name: str, model: LoadedModel) -> contextlib.AbstractContextManager[None]:
    """Plant a fault on the rollout engine of ``model`` until the block ends."""
    return fault_named(name).planting(model)
