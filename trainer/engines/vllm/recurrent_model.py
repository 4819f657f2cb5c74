"""Models with recurrent layers in vLLM: transformers' own code under the plan, over vLLM's blocks.

vLLM's scheduler, block tables, prefix cache, preemption and sampler; the trainer's module graph and
contracts for every number. :data:`NAME` is one more architecture in vLLM's registry
(``ModelRegistry.register_model``), which an engine gets by a config format of ours
(:mod:`.recurrent_config`)::

    LLM(folder, config_format=FORMAT, block_size=64, additional_config=adoption(plan))

It builds transformers' class from the checkpoint, applies the plan to it, and gives each attention
and recurrent layer a buffer in vLLM's cache (:mod:`.recurrent_cache`). The engine's ``batch`` that
the plan's sites ask (:class:`VllmBatch`) reads vLLM's tables of the step. Left out, each refused:
a model without recurrent layers (its vLLM class is served), layers of several chunk sizes, a stock
rule in the plan, and whatever no recipe covers in vLLM's settings.

Nothing here is imported without vLLM. Legend: T rows, H query heads, D head size.
"""

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context

from ....kernels.attention import paged_attention, read_slots, write_kv
from ....kernels.convolution import paged_convolution
from ....kernels.errors import CapabilityError
from ....kernels.recurrence import paged_recurrence
from ....model_recipes.apply import apply_plan
from ....model_recipes.models import load_model
from ....model_recipes.plan import STOCK
from ....model_recipes.recurrent import RecurrentLayer, Rows, StockStep
from ..paged_batch import attention_layers, head_shape
from ..rows import base_model
from . import compat, logprobs
from .admission import require_covered, violations
from .adoption import SLOT, adopted
from .operators import padded_rows
from .recurrent_cache import AttentionPages, RecurrentPages
from .recurrent_options import NAME


@dataclass(frozen=True, slots=True)
class VllmBatch:
    """One step's context. metadata: by layer name; None where vLLM measures without a batch.

    total: rows that are computed, padding too.
    """

    attention: Mapping[int, AttentionPages]
    recurrent: Mapping[int, RecurrentPages]
    metadata: Mapping[str, Any] | None
    total: int

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        /,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        attention: str,
    ) -> Tensor:
        """Write k and v, then attend over the request's blocks: ``[T, H, D]``."""
        if self.metadata is None:
            return torch.zeros_like(q)
        pages = self.attention[layer_idx]
        step, cache = self.metadata[pages.layer_name], pages.views()
        write_kv(cache, k[: step.rows], v[: step.rows], step.batch.slot)
        o = paged_attention(
            q[: step.rows], cache, step.batch, scale=scale, window=window, softcap=softcap,
            sinks=sinks, contract=attention,
        )  # fmt: skip
        return _padded(o, len(q))

    def stored(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """This step's k and v, as read back from the blocks; zeros for padding."""
        assert self.metadata is not None
        pages = self.attention[layer_idx]
        k, v = read_slots(pages.views(), self.metadata[pages.layer_name].batch.slot)
        return _padded(k, self.total), _padded(v, self.total)

    def convolve(
        self, layer: RecurrentLayer, x: Tensor, weight: Tensor, bias: Tensor | None,
        activation: str | None,
    ) -> Tensor:  # fmt: skip
        """Write the rows, then convolve: ``[T, channels]``."""
        if self.metadata is None:
            return torch.zeros_like(x)
        pages = self.recurrent[layer.index]
        step, cache = self.metadata[pages.layer_name], pages.views().convolution
        kind = cast(Any, activation)
        y = paged_convolution(x[: step.rows], weight, bias, kind, cache, step.batch)
        return _padded(y, len(x))

    def recur(
        self, layer: RecurrentLayer, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
        beta: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Write the rows, fold the chunks that they fill: fp32 ``[T, value heads, V]``."""
        if self.metadata is None:
            return torch.zeros(v.shape, dtype=torch.float32, device=v.device)
        pages = self.recurrent[layer.index]
        step, cache = self.metadata[pages.layer_name], pages.views().recurrence
        q, k, new_v, g = (x[: step.rows] for x in (q, k, v, g))
        beta = None if beta is None else beta[: step.rows]
        o = paged_recurrence(layer.kind, q, k, new_v, g, beta, cache, step.batch)
        return _padded(o, len(v))

    def carry(self, layer: RecurrentLayer, part: str, rows: Rows, step: StockStep) -> Tensor:
        """Never asked: a plan with stock parts is refused."""
        raise AssertionError(layer.path)


def rows_of_forward(given: Tensor) -> int:
    """Rows that are computed for these: on a GPU more, so that few shapes are proved."""
    return padded_rows(len(given)) if given.is_cuda else len(given)


def _padded(rows: Tensor, total: int) -> Tensor:
    if len(rows) == total:
        return rows
    padded = rows.new_zeros(total, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


@contextmanager
def _plainly() -> Generator[None]:
    """As in the trainer's process: vLLM builds models under another default device and dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


class AlignedModule(nn.Module):
    """See the module."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        asked = adopted(vllm_config.additional_config)
        if asked is None:
            raise CapabilityError(
                f"architecture {NAME} computes by a plan, and additional_config names none; name a "
                "recipe, or leave config_format out"
            )
        model, device = vllm_config.model_config, compat.device_of(vllm_config)
        require_covered(violations(vllm_config, asked))
        with _plainly():
            loaded = load_model(
                model.model, dtype=cast(Any, str(model.dtype).removeprefix("torch.")),
                device=str(device),
            )  # fmt: skip
            self.instrument = apply_plan(loaded.module, asked.plan)
        plan, sites = asked.plan, self.instrument.sites
        require_covered([
            f"{site.name} is left stock: a model in vLLM is computed by contract throughout"
            for site in sites if plan.choice(site) == STOCK
        ])  # fmt: skip
        self.module = loaded.module.requires_grad_(False)
        self.config = loaded.config
        self.served = Counter(site.op_class for site in sites)
        self.__dict__[SLOT] = asked
        self._make_pages(vllm_config, model.dtype)
        logprobs.serve(self)
        with _plainly():
            self._tabulate(min(model.max_model_len, self.config.max_position_embeddings))

    def _tabulate(self, length: int) -> None:
        """Rotary tables for every position now: a capture cannot ask how long they must be."""
        for site in self.instrument.sites:
            if site.op_class == "rotary_table":
                rotary = self.module.get_submodule(site.name)
                like = next(self.module.parameters())
                last = torch.tensor([[length - 1]], device=like.device)
                rotary(like, last)

    def _make_pages(self, vllm_config: Any, dtype: torch.dtype) -> None:
        layers = self.instrument.recurrent
        chunks = {layer.chunk for layer in layers.values()}
        block = int(vllm_config.cache_config.block_size)
        if chunks != {block}:
            raise CapabilityError(
                f"recurrent layers with chunks of {sorted(chunks)} rows and vLLM's blocks of "
                f"{block} tokens: a block holds one chunk; pass block_size="
                f"{min(chunks, default=block)}, or serve a model without recurrent layers by its "
                "own architecture"
            )
        kv_heads, head_size = head_shape(self.config)
        self.attention = {
            index: AttentionPages(
                vllm_config, f"layers.{index}.attention", block, dtype=dtype,
                heads=int(self.config.num_attention_heads), kv_heads=kv_heads, head_size=head_size,
            )
            for index in attention_layers(self.instrument)
        }  # fmt: skip
        self.recurrent = {
            index: RecurrentPages(vllm_config, f"layers.{index}.recurrence", layer, dtype)
            for index, layer in layers.items()
        }

    # -- what vLLM calls -------------------------------------------------------------------------

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Rows of the embedding."""
        return cast(Any, self.module).get_input_embeddings()(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Final hidden states ``[T, hidden]`` of one step."""
        if input_ids is None or inputs_embeds is not None:
            raise CapabilityError("embeddings as input are not served; pass token ids")
        rows, total = len(input_ids), rows_of_forward(input_ids)
        metadata = cast("Mapping[str, Any] | None", get_forward_context().attn_metadata)
        hidden = base_model(self.instrument)(
            input_ids=_padded(input_ids.long(), total)[None],
            position_ids=_padded(positions.long(), total)[None],
            use_cache=False,
            batch=VllmBatch(self.attention, self.recurrent, metadata, total),
        ).last_hidden_state[0]
        return hidden[:rows]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """fp32 ``[T, vocabulary]``."""
        rows = _padded(hidden_states, rows_of_forward(hidden_states))
        return self.instrument.head_logits(rows)[: len(hidden_states)]

    def load_weights(self, weights: Any) -> set[str]:
        """They were loaded with the module, as the trainer loads them."""
        from .models import check_weights

        check_weights(self)
        return {name for name, _ in self.named_parameters()}
