"""Operator sites: where in a model a number is computed, and how a tool can watch it.

A site is an operator, not a module: attention, rotary, gated products and residual adds are sites
of their own. A :class:`SiteCall` is one execution of one site; its tensors have one row per token,
so that a row of a decode step and a row of a whole prefill can be compared.

    Site(path="model.layers.3.self_attn", part="attention", op_class="attention",
         contract="attention.pages16.float32.cpu.v1")

A listener (see :class:`SiteListener`) sees every call and may return another output, which then
flows on: that is how grafting works. Nothing here knows requests or engines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One operator site.

    path: module path in the transformers model (``model.layers.0.mlp``).
    part: which operator inside that module; empty when the module is the operator.
    op_class: ``linear``, ``rmsnorm``, ``rmsnorm_wide``, ``rotary``, ``rotary_table``,
        ``attention``, ``gated``, ``gated_gelu``, ``activation``, ``activation_gelu``, ``add``
        (also differences), ``mul`` (also quotients), ``embedding``, ``lm_head``, ``softcap``,
        ``logprob``, ``kv_write``, ``router``, ``topk``, ``topk_weights``, ``grouped_linear``,
        ``combine``, ``convolution``, ``recurrence_ssd``, ``recurrence_gated_delta``,
        ``recurrence_kda``, ``l2norm``, ``gated_rmsnorm``, ``gated_rmsnorm_wide``, ``sigmoid``,
        ``activation_relu2``, ``decay``, ``time_step``, ``discretised``, ``skip``.
    contract: contract id under the applied plan; None means stock and uncertified.
    """

    path: str
    part: str = ""
    op_class: str
    contract: str | None = None

    @property
    def name(self) -> str:
        """``path`` or ``path#part``: unique within a model."""
        return f"{self.path}#{self.part}" if self.part else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCall:
    """One execution of a site.

    call: how often this site ran before in the same step (0 for the first).
    inputs: by name, each ``[rows, ...]``; weights are not inputs.
    output: ``[rows, ...]``, same rows.
    weights: names of the parameters used, as in ``named_parameters()``.
    rerun: recompute the output from other inputs of the same kind, or None where the site also
        reads state (attention over a cache).
    definition: the model's own code, where no formula of this package says what is computed (a
        module that a recipe's kernel serves), else None.
    """

    site: Site
    call: int
    inputs: Mapping[str, Tensor]
    output: Tensor
    weights: tuple[str, ...] = ()
    rerun: Callable[[Mapping[str, Tensor]], Tensor] | None = field(default=None, compare=False)
    definition: Callable[[Mapping[str, Tensor]], Tensor] | None = field(default=None, compare=False)


class SiteListener(Protocol):
    """Sees a site call; may return a tensor of the output's shape to put in its place.

    The call's tensors are the model's own: copy what is kept, since later code may overwrite them.
    """

    def __call__(self, call: SiteCall, /) -> Tensor | None: ...
