"""Attention as a site: the registered attention function, and the context that an engine passes in.

transformers looks an attention function up by the config's name for it. :mod:`.apply` sets that
name to one registered here; the function then finds the instrument of its own module, so that
models with different plans live side by side. Two ways:

- **context**: the engine hands a ``batch`` to the model (``model.model(ids, position_ids=...,
  use_cache=False, batch=batch)``), which reaches this function as a keyword and does the work
  (:class:`AttentionContext`). Without one, rows are packed by their position ids: position 0 starts
  a sequence.
- **module**: transformers' own function, mask and cache stay, and are watched. Stock only.

What a model passes that nobody here understands is an error, never ignored.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.errors import ContractError, UncoveredSiteError, UsageError
from .grafted_rows import GraftedRows
from .plan import STOCK
from .recurrent import WholeRequests
from .sites import Site
from .tap import Tap, head_rows

CONTEXT_NAME = "zero_mismatch"
_SLOT = "_zero_mismatch_attention"  # attribute of an instrumented attention module

# Keywords that models pass along and that do not change what attention computes here: the context
# knows positions and lengths, and nothing else is asked for.
_HARMLESS = frozenset(
    (
        "position_ids", "use_cache", "cache_position", "num_items_in_batch", "return_dict",
        "output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep",
    )
)  # fmt: skip


class AttentionContext(Protocol):
    """What an engine's batch object offers: attention over the keys that each row may see.

    It may also have ``stored(layer_idx) -> (k, v)``: the rows of this step as read back from the
    cache. Without it, k and v count as stored the way they were handed over.
    """

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
        """``[T, H, D]`` from q of that shape and k, v ``[T, HK, D]``.

        attention: ``stock`` or a contract id.

        """
        ...


@dataclass(frozen=True, slots=True)
class PackedRows(WholeRequests):
    """The context of a plain call without an engine: packed rows, no cache."""

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
        """Packed attention by the plan's contract."""
        from ..kernels.attention import packed_attention

        if attention == STOCK:
            raise ContractError(
                "stock attention without an engine needs transformers' own function; apply the "
                "plan with "
                "attention='module', or pass a batch"
            )
        return packed_attention(
            q, k, v, self.query_start, scale=scale, window=window, softcap=softcap, sinks=sinks,
            contract=attention,
        )  # fmt: skip


def packed_rows(position_ids: Tensor, batch: int, tokens: int) -> PackedRows:
    """Sequence starts are the rows with position 0; every sequence must then count up by one."""
    flat = position_ids.expand(batch, tokens).reshape(-1)
    starts = torch.nonzero(flat == 0).flatten()
    counts_up = bool(((flat[1:] == flat[:-1] + 1) | (flat[1:] == 0)).all())
    if not counts_up or starts.numel() == 0 or int(starts[0]) != 0:
        raise ContractError(
            "position_ids must start at 0 and count up by one in every packed sequence; use an "
            "engine "
            "for anything with a cache"
        )
    end = torch.tensor([flat.numel()], device=flat.device)
    return PackedRows(query_start=torch.cat([starts, end]).to(torch.int32))


def packed_context(tap: Tap, position_ids: Tensor | None = None) -> PackedRows:
    """The context of the running forward without an engine, made by its first layer.

    position_ids: None takes what the model was given; without any, each row is one sequence.
    """
    if not isinstance(tap.context, PackedRows):
        with tap.site_code():
            assert tap.batch_shape is not None
            given = tap.position_ids if position_ids is None else position_ids
            given = torch.arange(tap.batch_shape[1]) if given is None else given
            tap.context = packed_rows(given, *tap.batch_shape)
    return tap.context


AttentionRun = Callable[..., tuple[Tensor, Tensor | None]]


def registered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls; the module's own instrument does the work."""
    run = cast("AttentionRun | None", module.__dict__.get(_SLOT))
    if run is None:
        raise ContractError(
            f"{type(module).__name__} asks for zero-mismatch attention but carries no plan; "
            "apply one, or set attn_implementation back to sdpa"
        )
    return run(module, query, key, value, attention_mask, **keywords)


def context_mask(*, attention_mask: Tensor | None = None, **_: Any) -> None:
    """No mask: the context knows which keys a row sees. Padding in front is refused, not ignored.

    Padding behind a sequence changes nothing for the tokens before it (attention is causal).
    """
    if attention_mask is None or bool(attention_mask.all()):
        return
    present = attention_mask.to(torch.bool)
    if attention_mask.dim() != 2 or bool((present[:, 1:] & ~present[:, :-1]).any()):
        raise ContractError(
            "left or inner padding cannot be used with an aligned plan; pack the sequences in one "
            "row "
            "with position_ids that restart at 0, or pad on the right"
        )


def register_names(original: str | None) -> str:
    """Register our functions with transformers; returns the name that watches ``original``."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    if original not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise UsageError(
            f"the model's attn_implementation is {original!r}, which transformers does not know; "
            "load it with attn_implementation='sdpa'"
        )
    AttentionInterface.register(CONTEXT_NAME, registered_attention)
    AttentionMaskInterface.register(CONTEXT_NAME, context_mask)
    watched = f"{CONTEXT_NAME}_{original}"
    AttentionInterface.register(watched, registered_attention)
    AttentionMaskInterface.register(watched, ALL_MASK_ATTENTION_FUNCTIONS[original])
    return watched


def keep_softcap(module: nn.Module) -> None:
    """Run stock attention eagerly where the model bends its scores (Gemma 2).

    transformers' sdpa drops the ``softcap`` that the model hands over, without a word: the stock
    model would then be another model.
    """
    config = cast(Any, module).config
    bent = getattr(config, "attn_logit_softcapping", None) is not None
    if not bent or config._attn_implementation != "sdpa":
        return
    if any(map(_passes_softcap, module.modules())):
        cast(Any, module).set_attn_implementation("eager")


def _passes_softcap(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and any("softcap" in c for c in code.co_consts if isinstance(c, tuple))


def attention_function(module: nn.Module, name: str) -> AttentionRun:
    """transformers' function for ``name``, as this module's code would look it up."""
    from transformers import AttentionInterface

    from .recognise import INTERFACES, original_global

    interfaces = cast("AttentionInterface", original_global(module, INTERFACES))
    default = original_global(module, "eager_attention_forward")
    return cast("AttentionRun", interfaces.get_interface(name, cast(Any, default)))


class AttentionSite:
    """Attention and cache write of one attention module: two sites."""

    def __init__(self, tap: Tap, attention: Site, kv_write: Site, choice: str) -> None:
        self.tap = tap
        self.attention = attention
        self.kv_write = kv_write
        self.choice = choice
        self.cache: object | None = None  # transformers', of the running forward
        self.grafted = GraftedRows()

    def install(
        self, module: nn.Module, mode: Literal["context", "module"], original: str
    ) -> Callable[[], None]:
        """Attach to an attention module; returns what undoes it."""
        if mode == "context":
            module.__dict__[_SLOT] = self.run_context
            return lambda: module.__dict__.pop(_SLOT, None)
        module.__dict__[_SLOT] = functools.partial(
            self.run_module, attention_function(module, original)
        )
        hook = module.register_forward_pre_hook(self._note_cache, with_kwargs=True)

        def undo() -> None:
            hook.remove()
            module.__dict__.pop(_SLOT, None)

        return undo

    def _note_cache(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        """The cache's keyword has other names in other releases; what it can do has not."""
        given = (*arguments, *keywords.values())
        caches = (value for value in given if hasattr(value, "get_seq_length"))
        self.cache = next(caches, None)

    def run_context(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float,
        dropout: float = 0.0,
        batch: AttentionContext | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Attention by the engine's batch object (or packed by position ids)."""
        num_sequences, _, tokens, _ = query.shape
        self._check(query, key, attention_mask, dropout, keywords)
        if batch is None:
            batch = self._packed(keywords.get("position_ids"))
        layer = int(cast(Any, module).layer_idx)
        q, k, v = head_rows(query), head_rows(key), head_rows(value)
        width = v.shape[-1]
        if width < k.shape[-1]:
            # One cache has one head size: zero columns of v cost time and change no other column.
            with self.tap.site_code():
                v = F.pad(v, (0, k.shape[-1] - width))

        def attend(k: Tensor, v: Tensor) -> Tensor:
            with self.tap.site_code():
                return batch.attend(
                    layer,
                    q,
                    k,
                    v,
                    scale=scaling,
                    window=sliding_window,
                    softcap=softcap,
                    sinks=s_aux,
                    attention=self.choice,
                )

        output = attend(k, v)
        if self.tap.watching:
            stored = getattr(batch, "stored", None)
            with self.tap.site_code():
                kept = stored(layer) if stored is not None else (k, v)
            grafted = self._observe_write(k, v, *kept)
            if grafted is not None:
                k, v = grafted
                output = attend(k, v)
            graft = self.tap.observe(self.attention, {"q": q, "k": k, "v": v}, output)
            output = output if graft is None else graft
        return output[..., :width].unflatten(0, (num_sequences, tokens)), None

    def run_module(
        self,
        function: AttentionRun,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """transformers' own attention, watched; key and value hold the cache's rows too."""
        if not self.tap.watching:
            return function(module, query, key, value, attention_mask, **keywords)
        tokens = query.shape[2]
        # Copies: a graft may overwrite the cache after the listener has seen its rows.
        new_k = head_rows(key[:, :, -tokens:]).clone()
        new_v = head_rows(value[:, :, -tokens:]).clone()
        grafted = self._observe_write(new_k, new_v, new_k, new_v)
        if grafted is not None:
            new_k, new_v = grafted
        layer = int(cast(Any, module).layer_idx)
        key, value = self.grafted.over(self.cache, layer, (key, value), tokens, grafted)
        with self.tap.site_code():
            output, weights = function(module, query, key, value, attention_mask, **keywords)
        inputs = {"q": head_rows(query), "k": new_k, "v": new_v}
        graft = self.tap.observe(self.attention, inputs, output.flatten(0, 1))
        return output if graft is None else graft.reshape(output.shape), weights

    def _observe_write(
        self, k: Tensor, v: Tensor, stored_k: Tensor, stored_v: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        width = stored_v.shape[-1]  # may be less than a key's
        with self.tap.site_code():
            stored_v = F.pad(stored_v, (0, stored_k.shape[-1] - width))
            stored = torch.cat([stored_k, stored_v], dim=1)
        graft = self.tap.observe(self.kv_write, {"k": k, "v": v}, stored)
        if graft is None:
            return None
        heads = stored_k.shape[1]
        return graft[:, :heads], graft[:, heads:, :width]

    def _packed(self, position_ids: Any) -> AttentionContext:
        if not isinstance(position_ids, Tensor):
            raise ContractError(
                f"{self.attention.path} got neither a batch nor position_ids; pass position_ids "
                "to the model"
            )
        return packed_context(self.tap, position_ids)

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        dropout: float,
        keywords: Mapping[str, Any],
    ) -> None:
        unknown = sorted(
            name
            for name, value in keywords.items()
            if value is not None and name not in _HARMLESS and not (name == "is_causal" and value)
        )
        if unknown:
            raise UncoveredSiteError(
                f"{self.attention.name} is called with {', '.join(unknown)}, which no attention "
                "contract "
                "covers; use `--plan stock` on the transformers engine"
            )
        if key.shape[2] != query.shape[2]:
            raise ContractError(
                f"{self.attention.name} got {key.shape[2]} keys for {query.shape[2]} rows from a "
                "transformers "
                "cache; call the model with use_cache=False"
            )
        if mask is not None or dropout != 0.0:
            what = "an attention mask" if mask is not None else f"dropout {dropout}"
            raise ContractError(
                f"{self.attention.name} got {what}, which no attention contract covers; "
                "pack the sequences and set attention_dropout to 0"
            )
