"""The LM head: hidden rows to fp32 logits to logprobs, by the plan, watched or not.

Some models change their logits after the matrix. Two such tails are known; each is proved on a few
tokens before it is believed, and anything else on the logits is refused by the audit:

    softcap    cap tanh(logits / cap)      config.final_logit_softcapping (Gemma)
    quotient   logits / scaling            config.logits_scaling (Granite)

Engines take hidden rows from the base model and call :meth:`Head.logits` and :meth:`Head.logprob`;
a plain call of the model runs the same operators. For that the model's own tail is switched off in
its copy of the config, and the patched head does it. Under a contract the tail is computed in
fp32 on fp32 logits; stock computes it in the model's dtype.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..kernels.errors import ContractError
from . import operators
from .bindings import kernel
from .operators import Installer
from .plan import STOCK
from .recognise import Operator

_PROOF_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What happens to the logits after the matrix, and the config field that says so."""

    kind: Literal["softcap", "quotient"]
    value: float

    @property
    def field(self) -> str:
        """The config's name for the value."""
        return "final_logit_softcapping" if self.kind == "softcap" else "logits_scaling"

    @property
    def op_class(self) -> str:
        """The operator class of its site."""
        return "softcap" if self.kind == "softcap" else "mul"

    def stock(self, logits: Tensor) -> Tensor:
        """As transformers writes it, in the logits' dtype."""
        if self.kind == "softcap":
            return torch.tanh(logits / self.value) * self.value
        return logits / self.value

    def aligned(self, logits: Tensor) -> Tensor:
        """By contract, on fp32 logits."""
        if self.kind == "softcap":
            return kernel("softcap").softcap(logits, self.value)
        return logits / self.value

    def switch_off(self, config: Any) -> None:
        """Make the model's own tail do nothing; ``config`` must be a copy."""
        setattr(config, self.field, None if self.kind == "softcap" else 1.0)


def find_tail(module: nn.Module) -> Tail | None:
    """The tail of an untouched model, proved bit for bit on a small forward; None for none known.

    A model that does something else to its logits also gives None; the audit names it.
    """
    config = cast(Any, module).config
    cap, scaling = (
        getattr(config, name, None) for name in ("final_logit_softcapping", "logits_scaling")
    )
    tails: list[Tail] = []
    if cap is not None:
        tails.append(Tail(kind="softcap", value=float(cap)))
    if scaling not in (None, 1.0):
        tails.append(Tail(kind="quotient", value=float(scaling)))
    if len(tails) != 1:
        return None
    raw: list[Tensor] = []
    head = cast(nn.Module, cast(Any, module).get_output_embeddings())
    hook = head.register_forward_hook(lambda _head, _inputs, output: raw.append(output.clone()))
    try:
        with torch.no_grad():
            ids = torch.arange(_PROOF_TOKENS, device=next(module.parameters()).device)[None]
            logits = module(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return tails[0] if torch.equal(tails[0].stock(raw[0]), logits) else None


class Head:
    """The head's sites and how the plan computes them."""

    def __init__(self, installer: Installer, operator: Operator, tail: Tail | None) -> None:
        self._tap = installer.tap
        self._linear = cast(nn.Linear, operator.module)
        self._weights = operators.tensor_names(operator.module, operator.path, installer.names)
        self.tail = tail
        self.site, choice = installer.site(operator.path, "lm_head")
        choices = [choice]
        if tail is not None:
            self.tail_site, tail_choice = installer.site("logits", tail.op_class, tail.kind)
            choices.append(tail_choice)
            self._run_tail = tail.aligned if tail_choice != STOCK else self._stock_tail
        self._own = operators.lm_head_function(self._linear, choice)
        self._put_forward(installer)
        self.logprob_site, choice = installer.site("logprob", "logprob")
        self._run_logprob = operators.logprob_function(choice)
        self._fused = tail is None and STOCK not in (*choices, choice)

    @property
    def sites(self) -> tuple[Any, ...]:
        """In the order in which they run."""
        tail = () if self.tail is None else (self.tail_site,)
        return (self.site, *tail, self.logprob_site)

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden[T, H]`` -> fp32 logits ``[T, V]``."""
        if not self._tap.watching:
            logits = self._own(hidden).float()
            return logits if self.tail is None else self._run_tail(logits)
        return self._watched(hidden, lambda h: self._own(h).float(), flat=True)

    def logprob(self, hidden: Tensor, targets: Tensor, temperature: float | Tensor) -> Tensor:
        """``hidden[T, H]``, ``targets[T]`` -> fp32 logprob ``[T]``."""
        temperatures = _temperatures(hidden, targets, temperature)
        if self._fused and not self._tap.watching:
            return kernel("logprob").lm_head_logprob(
                hidden, self._linear.weight, targets, self._linear.bias, temperatures
            )
        logits = self.logits(hidden)
        self._tap.begin_rows(self.logprob_site)
        inputs = {"logits": logits, "targets": targets, "temperature": temperatures}
        return self._tap.through(
            self.logprob_site,
            lambda values: self._run_logprob(
                values["logits"], values["targets"], values["temperature"]
            ),
            inputs,
            flat=True,
        )

    def _watched(self, hidden: Tensor, run: Callable[[Tensor], Tensor], *, flat: bool) -> Tensor:
        if flat:
            self._tap.begin_rows(self.site)
        logits = self._tap.through(
            self.site,
            lambda inputs: run(inputs["h"]),
            {"h": hidden},
            weights=self._weights,
            flat=flat,
        )
        if self.tail is None:
            return logits
        if flat:
            self._tap.begin_rows(self.tail_site)

        def on_logits(inputs: Mapping[str, Tensor]) -> Tensor:
            return self._run_tail(inputs["logits"])

        return self._tap.through(self.tail_site, on_logits, {"logits": logits}, flat=flat)

    def _stock_tail(self, logits: Tensor) -> Tensor:
        """In the dtype that stock logits have, whose fp32 widening is exact."""
        assert self.tail is not None
        return self.tail.stock(logits.to(self._linear.weight.dtype)).to(logits.dtype)

    def _put_forward(self, installer: Installer) -> None:
        """What a plain call of the model runs: stock logits keep the model's dtype."""

        def forward(hidden: Tensor) -> Tensor:
            if self._tap.watching:
                return self._watched(hidden, self._own, flat=False)
            logits = self._own(hidden)
            return logits if self.tail is None else self._run_tail(logits)

        installer.put_forward(self._linear, forward)


def _temperatures(hidden: Tensor, targets: Tensor, temperature: float | Tensor) -> Tensor:
    rows = hidden.shape[0]
    if isinstance(temperature, Tensor):
        temperatures = temperature.to(hidden.device, torch.float32)
    else:
        temperatures = torch.full((rows,), temperature, dtype=torch.float32, device=hidden.device)
    if targets.shape != (rows,) or temperatures.shape != (rows,):
        raise ContractError(
            f"{rows} hidden rows need as many targets and temperatures (got "
            f"{list(targets.shape)}, {list(temperatures.shape)}); pass one of each per row"
        )
    if not bool((temperatures > 0).all()):
        raise ContractError(
            "temperature must be positive to score a token; score greedy samples at 1"
        )
    return temperatures
