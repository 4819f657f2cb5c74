"""TRL's fused LM head under a plan, so that TRL's trainers score tokens by the recipe.

    trainer = GRPOTrainer(model, ...)
    zeromismatch.apply(trainer.model, recipe)

TRL's trainers never call a model's head: they replace ``model.forward`` by one that takes hidden
rows from the base model and multiplies them by the head's weight itself, in chunks of its own, over
rows that are padded on the left and whose positions begin with the padding. :func:`follow`, which
``apply`` calls, puts another one in its place: tokens that are not padding become packed rows with
positions from 0, hidden rows and logprobs come from the plan's operators, and what TRL expects is
filled in. Anything else that TRL might ask of it is refused. The entropy, which TRL logs, is
torch's own on the plan's logits.

Left out: rollouts (``zeromismatch.rollouts``), context parallelism, PEFT around the model.
``pytest tests/model_recipes/test_trl.py`` runs real TRL. Legend: B sequences, S positions, T rows,
H hidden, N scored tokens.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..kernels.errors import RecipeError, UsageError

if TYPE_CHECKING:
    from .apply import Instrument

_SWITCH = "fused_lm_head"
_NEEDED = ("temperature", "outputs", "cast_lm_head_to_fp32")
_KNOWN = ("log_probs", "entropy")
_GIVEN = frozenset(("input_ids", "attention_mask", "use_cache"))
BLOCK = 512
"""Rows whose logits are held at once for the entropy."""


def follow(model: nn.Module, instrument: "Instrument") -> Callable[[], None] | None:
    """Put the plan's head into TRL's forward; returns what takes it out again.

    None for a model that has no such forward. RecipeError for one that is not known here.
    """
    own = cast("Callable[..., Any] | None", model.__dict__.get("forward"))
    function = getattr(own, "__func__", None)
    if own is None or function is None or _SWITCH not in _parameters(function):
        return None
    settings = inspect.getclosurevars(function).nonlocals
    missing = [name for name in _NEEDED if name not in settings]
    foreign = [name for name in settings.get("outputs", ()) if name not in _KNOWN]
    if missing or foreign or settings["cast_lm_head_to_fp32"]:
        what = "casts the head to fp32" if not (missing or foreign) else "is another one"
        raise RecipeError(
            f"this model's fused LM head {what} ({', '.join(missing + foreign) or 'TRL'}); use "
            "TRL 1.16 without cast_lm_head_to_fp32, or apply the recipe to a plain model"
        )
    outputs, temperature = tuple(settings["outputs"]), float(settings["temperature"])

    def forward(*arguments: Any, fused_lm_head: bool = False, **keywords: Any) -> Any:
        if not fused_lm_head:
            return own(*arguments, **keywords)
        return _scored(model, instrument, arguments, keywords, temperature, outputs)

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]  # TRL looks at it
    model.__dict__["forward"] = forward
    return lambda: model.__dict__.__setitem__("forward", own)


def _parameters(function: Any) -> tuple[str, ...]:
    """Names as they are in the code: a wrapper shows the signature of what it wraps."""
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _scored(
    model: nn.Module,
    instrument: "Instrument",
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    temperature: float,
    outputs: tuple[str, ...],
) -> Any:
    """What TRL's own forward returns, by the plan."""
    from trl.trainer.utils import FusedCausalLMOutput

    labels, count = keywords.pop("labels", None), keywords.pop("num_items_in_batch", None)
    foreign = sorted(name for name in keywords.keys() - _GIVEN if keywords[name] is not None)
    if arguments or foreign or labels is None:
        raise UsageError(
            f"a fused head under a plan takes input_ids, attention_mask and labels, not "
            f"{', '.join(foreign) or 'other arguments'}; leave that option of TRL off"
        )
    ids: Tensor = keywords["input_ids"]
    real = keywords.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real.bool()
    scored = labels[:, 1:] != -100
    if not bool(real[:, :-1][scored].all()):
        raise UsageError("a scored token follows padding; give every response a prompt")
    positions = real.long().cumsum(1) - 1
    base = cast(Any, model).base_model
    hidden_TH = base(
        input_ids=ids[real][None], position_ids=positions[real][None], use_cache=False
    ).last_hidden_state[0]
    row = torch.full_like(ids, -1)
    row[real] = torch.arange(hidden_TH.shape[0], device=ids.device)
    hidden_NH = hidden_TH[row[:, :-1][scored]]
    logp_N = instrument.head_logprob(hidden_NH, labels[:, 1:][scored], temperature)

    def placed(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(scored.shape).masked_scatter(scored, values_N)

    logp = placed(logp_N)
    entropy = None
    if "entropy" in outputs:
        entropy = placed(_entropy(instrument, hidden_NH, temperature))
    total = scored.sum().clamp(min=1) if count is None else count
    return FusedCausalLMOutput(
        loss=-logp.sum() / total, log_probs=logp, entropy=entropy, label_mask=scored
    )


def _entropy(instrument: "Instrument", hidden_NH: Tensor, temperature: float) -> Tensor:
    """fp32 [N], differentiable; the logits of a block at a time."""

    def of(block: Tensor) -> Tensor:
        logp = torch.log_softmax(instrument.head_logits(block) / temperature, dim=-1)
        return -(logp.exp() * logp).sum(-1)

    blocks = hidden_NH.split(BLOCK)
    return torch.cat([cast(Tensor, checkpoint(of, block, use_reentrant=False)) for block in blocks])
