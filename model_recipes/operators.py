"""How each recognised operator runs under a plan: its patched ``forward``, stock or by contract.

Every function here takes an :class:`Installer` and an operator, decides what computes it, and puts
a ``forward`` on that one module instance. Under ``stock`` the original code computes, so that a
traced stock run has stock bits. With nobody listening a patched ``forward`` adds one test.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.errors import UncoveredSiteError
from .bindings import kernel
from .extension import extension_for, own_contracts, rows_call
from .plan import STOCK, Plan
from .recognise import (
    ROTARY_FUNCTIONS,
    Operator,
    original_global,
    replace_globals,
    tensor_names,
)
from .recurrent_sites import sigmoid_globals
from .rotary_table import RotaryTable
from .sites import Site
from .tap import Tap, from_head_rows, head_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Installer:
    """What the patches share. ``undo`` takes them off again; ``sites`` is what they serve."""

    tap: Tap
    plan: Plan
    names: Mapping[int, str]
    undo: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    sites: list[Site] = field(default_factory=list[Site])

    def site(
        self, path: str, op_class: str, part: str = "", *, own: bool = False
    ) -> tuple[Site, str]:
        """The site with its contract, and the plan's choice for it. own: a recipe's kernel runs."""
        bare = Site(path=path, part=part, op_class=op_class)
        choice = self.plan.choice(bare)
        if choice in own_contracts() and not own:
            raise UncoveredSiteError(
                f"{bare.name} is no module that the kernel of {choice} names in MODULES; name its "
                "class there, or override this site in the plan"
            )
        contract = None if choice == STOCK else choice
        site = Site(path=path, part=part, op_class=op_class, contract=contract)
        self.sites.append(site)
        return site, choice

    def put_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Give one instance its own ``forward``."""
        module.__dict__["forward"] = forward
        self.undo.append(lambda: module.__dict__.pop("forward", None))

    def put_unary(
        self, operator: Operator, name: str, site: Site, run: Callable[[Tensor], Tensor]
    ) -> None:
        """Patch a module whose forward takes one tensor."""
        tap, weights = self.tap, tensor_names(operator.module, operator.path, self.names)

        def on_inputs(inputs: Mapping[str, Tensor]) -> Tensor:
            return run(inputs[name])

        def forward(value: Tensor) -> Tensor:
            if not tap.watching:
                return run(value)
            return tap.through(site, on_inputs, {name: value}, weights=weights)

        self.put_forward(operator.module, forward)


def _original(module: nn.Module) -> Callable[..., Any]:
    """The class's own forward, bound to the instance."""
    return type(module).forward.__get__(module)


def install_linear(installer: Installer, operator: Operator) -> None:
    """``nn.Linear``."""
    site, choice = installer.site(operator.path, "linear")
    module = cast(nn.Linear, operator.module)

    def aligned(x: Tensor) -> Tensor:
        return linear(x, module.weight, module.bias)

    run = _original(module)
    if choice != STOCK:
        linear, run = kernel("linear").linear, aligned
    installer.put_unary(operator, "x", site, run)


def lm_head_function(module: nn.Linear, choice: str) -> Callable[[Tensor], Tensor]:
    """``h -> logits``: stock in the model's dtype, by contract fp32."""
    if choice == STOCK:
        return _original(module)
    lm_head = kernel("lm_head").lm_head

    def aligned(h: Tensor) -> Tensor:
        return lm_head(h, module.weight, module.bias)

    return aligned


def install_rmsnorm(installer: Installer, operator: Operator) -> None:
    """``*RMSNorm``."""
    module, facts = operator.module, operator.facts
    op_class = "rmsnorm_wide" if facts["wide"] else "rmsnorm"
    site, choice = installer.site(operator.path, op_class)

    def aligned(x: Tensor) -> Tensor:
        if facts["wide"]:
            return norms.rmsnorm_wide(x, module.weight, facts["eps"])
        return norms.rmsnorm(x, module.weight, facts["eps"], unit_offset=facts["unit_offset"])

    run = _original(module)
    if choice != STOCK:
        norms, run = kernel(op_class), aligned
    installer.put_unary(operator, "x", site, run)


def install_embedding(installer: Installer, operator: Operator) -> None:
    """``nn.Embedding``, and Gemma's, which multiplies its rows by a scalar afterwards."""
    site, choice = installer.site(operator.path, "embedding")
    module = cast(nn.Embedding, operator.module)

    def stock(ids: Tensor) -> Tensor:
        return nn.Embedding.forward(module, ids)

    def aligned(ids: Tensor) -> Tensor:
        rows = embedding(ids, module.weight)
        if module.padding_idx is None or not rows.requires_grad:
            return rows
        # As nn.Embedding: the padding token's row gets no gradient from being looked up.
        return torch.where((ids == module.padding_idx)[..., None], rows.detach(), rows)

    run = stock
    if choice != STOCK:
        embedding, run = kernel("embedding").embedding, aligned
    installer.put_unary(operator, "ids", site, run)
    if operator.kind == "scaled_embedding":
        lookup = module.__dict__["forward"]
        scale = cast(Tensor, cast(Any, module).embed_scale)

        def forward(ids: Tensor) -> Tensor:
            return lookup(ids) * scale.to(module.weight.dtype)

        installer.put_forward(module, forward)


def install_activation(installer: Installer, operator: Operator) -> None:
    """An activation that stands alone."""
    op_class, function, _ = ACTIVATIONS.get(operator.facts["activation"], _UNKNOWN)
    site, choice = installer.site(operator.path, op_class)
    run: Callable[[Tensor], Tensor] = _original(operator.module)
    if choice != STOCK:
        _require_kernel(site, operator)
        run = getattr(kernel(op_class), function)
    installer.put_unary(operator, "x", site, run)


def install_extension(installer: Installer, operator: Operator) -> None:
    """A module that a recipe's own kernel serves; its inputs are tensors of token rows."""
    extension = extension_for(operator.module)
    assert extension is not None
    site, choice = installer.site(operator.path, extension.op_class, own=True)
    tap, module = installer.tap, operator.module
    definition = rows_call(extension, module, _original(module))
    run = definition if choice == STOCK else rows_call(extension, module, None)
    weights = tensor_names(module, operator.path, installer.names)

    def forward(*tensors: Tensor) -> Tensor:
        inputs = {f"x{place}": tensor for place, tensor in enumerate(tensors)}
        if not tap.watching:
            return run(inputs)
        return tap.through(site, run, inputs, weights=weights, definition=definition)

    installer.put_forward(module, forward)


# Activation -> class of the activation, its kernel, the gated product's kernel.
ACTIVATIONS = {
    "silu": ("activation", "silu", "silu_mul"),
    "gelu_tanh": ("activation_gelu", "gelu", "gelu_mul"),
    "relu2": ("activation_relu2", "relu_squared", ""),
}
_UNKNOWN = ("activation", "", "")


def _require_kernel(site: Site, operator: Operator) -> None:
    activation = operator.facts["activation"]
    if activation not in ACTIVATIONS:
        raise UncoveredSiteError(
            f"{site.name} uses {activation}, for which there is no kernel contract; override this "
            "site with stock, or use `--plan stock`"
        )


def install_gated(installer: Installer, operator: Operator) -> None:
    """The product in ``down(act(gate(x)) * up(x))``; the projections are sites too."""
    op_class, _, fused = ACTIVATIONS.get(operator.facts["activation"], _UNKNOWN)
    op_class = op_class.replace("activation", "gated")
    site, choice = installer.site(operator.path, op_class, "gated")
    tap, module = installer.tap, operator.module
    down, act, gate, up = (
        cast(nn.Module, getattr(module, operator.facts[name]))
        for name in ("down", "act", "gate", "up")
    )

    def stock(g: Tensor, u: Tensor) -> Tensor:
        return act(g) * u

    product: Callable[[Tensor, Tensor], Tensor] = stock
    if choice != STOCK:
        _require_kernel(site, operator)
        product = getattr(kernel(op_class), fused)

    def on_inputs(inputs: Mapping[str, Tensor]) -> Tensor:
        return product(inputs["gate"], inputs["up"])

    def forward(x: Tensor) -> Tensor:
        g, u = gate(x), up(x)
        if not tap.watching:
            return down(product(g, u))
        return down(tap.through(site, on_inputs, {"gate": g, "up": u}))

    installer.put_forward(module, forward)


def install_rotary_table(installer: Installer, operator: Operator) -> None:
    """The module that makes cos and sin from positions; shown as one tensor, cos then sin."""
    site, choice = installer.site(operator.path, "rotary_table")
    tap = installer.tap
    table: Callable[..., tuple[Tensor, Tensor]] = _original(operator.module)
    if choice != STOCK:
        table = RotaryTable(operator.module, site.name)

    def forward(
        x: Tensor, position_ids: Tensor, *rest: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        with tap.site_code():
            cos, sin = table(x, position_ids, *rest, **keywords)
        if not tap.watching:
            return cos, sin

        def rerun(inputs: Mapping[str, Tensor]) -> Tensor:
            again = table(x, inputs["positions"][None], *rest, **keywords)
            return torch.cat(again, dim=-1)[0]

        with tap.site_code():
            both = torch.cat((cos, sin), dim=-1).expand(*(tap.batch_shape or cos.shape[:2]), -1)
            positions = position_ids.expand(both.shape[:2]).flatten()
        graft = tap.observe(site, {"positions": positions}, both.flatten(0, 1), rerun=rerun)
        if graft is None:
            return cos, sin
        halves = graft.reshape(both.shape).chunk(2, dim=-1)
        return halves[0], halves[1]

    installer.put_forward(operator.module, forward)


def install_rotary(installer: Installer, operator: Operator) -> None:
    """Rotary embedding: a global function of the attention module's code, replaced for it alone.

    So is a sigmoid that gates attention's output.
    """
    gate = sigmoid_globals(installer, operator)
    originals = {name: original_global(operator.module, name) for name in ROTARY_FUNCTIONS}
    found = {name: function for name, function in originals.items() if function is not None}
    if not found:  # what it does instead is seen by the audit
        if gate:
            installer.put_forward(operator.module, replace_globals(operator.module, gate))
        return
    site_q, choice = installer.site(operator.path, "rotary", "rotary_q")
    site_k, choice_k = installer.site(operator.path, "rotary", "rotary_k")
    if choice != choice_k:
        raise UncoveredSiteError(
            f"{site_q.name} and {site_k.name} run in one call; give both the same contract"
        )
    sites = site_q, site_k
    patched = {
        name: _rotary_patch(installer.tap, sites, choice, function, name == ROTARY_FUNCTIONS[1])
        for name, function in found.items()
    }
    installer.put_forward(operator.module, replace_globals(operator.module, patched | gate))


def _rotary_patch(
    tap: Tap, sites: tuple[Site, Site], choice: str, original: Callable[..., Any], pairs: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """What stands in for one of transformers' rotation functions."""
    rotate = _stock_rotary(original)
    if choice != STOCK:
        rotate = _aligned_rotary(takes_half_tables(original) and not pairs, pairs)

    def one(site: Site, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, _, tokens, _ = x.shape

        def on_rows(inputs: Mapping[str, Tensor]) -> Tensor:
            return rotate(inputs["x"], inputs["cos"], inputs["sin"])

        with tap.site_code():
            cos, sin = (table.expand(batch, tokens, -1).flatten(0, 1) for table in (cos, sin))
            rows = head_rows(x)
            output = on_rows({"x": rows, "cos": cos, "sin": sin})
        graft = tap.observe(site, {"x": rows, "cos": cos, "sin": sin}, output, rerun=on_rows)
        return from_head_rows(output if graft is None else graft, batch)

    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1:
            raise UncoveredSiteError(
                f"{sites[0].name} rotates along another axis (unsqueeze_dim={unsqueeze_dim}); "
                "use the transformers engine with `--plan stock`"
            )
        if choice == STOCK and not tap.watching:
            return original(q, k, cos, sin)
        return one(sites[0], q, cos, sin), one(sites[1], k, cos, sin)

    return apply


def takes_half_tables(original: Callable[..., Any]) -> bool:
    """Whether transformers' function wants every frequency once (gpt_oss), found by running it.

    With tables half as wide as the head, most functions cannot run or leave columns as they are.
    """
    x, table = torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 2)
    try:
        rotated = original(x, x, table, table)[0]
    except RuntimeError:
        return False
    return rotated.shape == x.shape and not bool(rotated.any())


def _aligned_rotary(half_tables: bool, pairs: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    apply_rotary = kernel("rotary").apply_rotary

    def from_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rotary(x, torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1))

    def from_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rotary(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), cos, sin)

    return from_pairs if pairs else from_halves if half_tables else apply_rotary


def _stock_rotary(original: Callable[..., Any]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """transformers' function on rows ``[T, heads, D]`` with tables ``[T, D]``.

    One exact operation after another per element: its bits do not depend on the layout.
    """

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return original(x, x[:, :0], cos, sin)[0]

    return rotate


def logprob_function(choice: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``(logits, targets, temperature[T]) -> logprob``: stock torch, or the contract's kernel."""
    if choice != STOCK:
        return kernel("logprob").logprob

    def stock(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
        scaled = logits / temperature[:, None]
        return F.log_softmax(scaled, dim=-1).gather(1, targets[:, None])[:, 0]

    return stock
