"""Put a plan onto a transformers model: each site computed as planned, and watchable.

    instrument = apply_plan(module, plan)           # patches this instance only
    instrument.listener = my_listener               # sees every site call, may replace outputs
    instrument.head_logprob(hidden, targets, 1.0)   # the head, by the plan
    instrument.remove()                             # as before

For a trainer that adopts a recipe, two lines:

    import zeromismatch
    zeromismatch.apply(model, "recipes/my-model")

Nothing global changes: two models in one process may carry two plans. Coverage is total: the plan
must cover every site, and an audit (:mod:`.audit`) refuses a model that computes anything outside
its sites.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from ..kernels.errors import RecipeError, UncoveredSiteError
from . import experts, fused_head, operators, recurrent_sites
from .attention import CONTEXT_NAME, AttentionSite, register_names
from .audit import Audit, probe_inputs
from .head import Head, find_tail
from .operators import Installer
from .plan import STOCK, Plan, check_plan, load_own_kernels, plan_from, stock_plan
from .recognise import Operator, first_tensor, recognise, replace_globals
from .recurrent import RecurrentLayer
from .schema import ModelIdentity, Recipe, load_recipe
from .sites import Site, SiteListener
from .state import config_digest, parameter_names, state_digest, weights_root
from .tap import Tap
from .watch import Trail, Uncovered, Watch

if TYPE_CHECKING:
    from ..kernels.moe import Routing

AttentionMode = Literal["context", "module"]

_SLOT = "_zero_mismatch_instrument"


class Instrument:
    """A plan on a model, until :meth:`remove`.

    sites: all operator sites in execution order; the head's two come last. recurrent: what the
    recurrent layers keep, by layer index.
    """

    def __init__(self, module: nn.Module, plan: Plan, attention: AttentionMode) -> None:
        if _SLOT in module.__dict__:
            raise RecipeError(
                f"this model already carries plan {module.__dict__[_SLOT].plan.name}; remove() it "
                "first"
            )
        self.module = module
        self.plan = plan
        self.attention_mode: AttentionMode = attention
        self.sites: tuple[Site, ...] = ()
        self.recurrent: dict[int, RecurrentLayer] = {}
        self._tap = Tap()
        self._trail = Trail()
        self._unhook: Callable[[], None] | None = None
        self._inline: dict[str, Site] = {}
        self._installer = Installer(tap=self._tap, plan=plan, names=parameter_names(module))
        try:
            self._install()
            self.audit = self._audit()
        except BaseException:
            self.remove()
            raise
        module.__dict__[_SLOT] = self

    # -- what engines use ------------------------------------------------------------------------

    @property
    def listener(self) -> SiteListener | None:
        """Who sees every site call; None costs nothing."""
        return self._tap.listener

    @listener.setter
    def listener(self, listener: SiteListener | None) -> None:
        self._tap.listener = listener
        self._follow(listener is not None)

    @property
    def routings(self) -> "Mapping[str, Routing]":
        """How each router chooses, by the site of its choice; empty without experts."""
        return cast("Mapping[str, Routing]", self._tap.routings)

    def force(self, choices: Mapping[str, Tensor]) -> None:
        """Choices ``[T, K]`` by site for the forwards that follow; empty lets routers choose."""
        self._tap.forced = choices

    def head_logits(self, hidden: Tensor) -> Tensor:
        """``hidden[T, H]`` -> fp32 logits ``[T, V]`` (site of the LM head, and of its tail)."""
        self._require_in_force()
        return self._head.logits(hidden)

    def head_logprob(
        self, hidden: Tensor, targets: Tensor, temperature: float | Tensor = 1.0
    ) -> Tensor:
        """``hidden[T, H]``, ``targets[T]`` -> fp32 logprob ``[T]``: the sites of the head.

        With a listener, or where the model changes its logits after the head, the logits of all
        rows are held at once: hand over blocks of rows.
        """
        self._require_in_force()
        return self._head.logprob(hidden, targets, temperature)

    def _require_in_force(self) -> None:
        """What a model without its plan computes must not pass for the plan's."""
        if self.module.__dict__.get(_SLOT) is not self:
            raise RecipeError(
                f"plan {self.plan.name} was taken off this model; apply it again, and make new "
                "engines"
            )

    def undo(self, step: Callable[[], None] | None) -> None:
        """Something that :meth:`remove` takes back as well, before all that came earlier."""
        self._installer.undo.extend(() if step is None else (step,))

    def remove(self) -> None:
        """Take the plan off again; the model is as it was."""
        self.listener = None
        while self._installer.undo:
            self._installer.undo.pop()()
        self.module.__dict__.pop(_SLOT, None)

    # -- installation ----------------------------------------------------------------------------

    def _install(self) -> None:
        found = recognise(self.module)
        tail = find_tail(self.module)
        self._own_config()
        config = cast(Any, self.module).config
        original = config._attn_implementation
        watched = register_names(original)
        config._attn_implementation = CONTEXT_NAME if self.attention_mode == "context" else watched
        if tail is not None:
            tail.switch_off(config)
        for operator in found:
            self._install_one(operator, original)
        head = next(operator for operator in found if operator.kind == "lm_head")
        self._head = Head(self._installer, head, tail)
        self._wrap_base()

    def _install_one(self, operator: Operator, original: str) -> None:
        installer = self._installer
        match operator.kind:
            case "linear":
                operators.install_linear(installer, operator)
            case "lm_head":
                pass  # the head comes last
            case "rmsnorm":
                operators.install_rmsnorm(installer, operator)
            case "embedding" | "scaled_embedding":
                operators.install_embedding(installer, operator)
            case "activation":
                operators.install_activation(installer, operator)
            case "gated":
                operators.install_gated(installer, operator)
            case "router":
                experts.install_router(installer, operator)
            case "experts":
                experts.install_experts(installer, operator)
            case "mixer":
                recurrent_sites.install_mixer(installer, operator, self.attention_mode)
                layer: RecurrentLayer = operator.facts["mixer"].layer
                self.recurrent[layer.index] = layer
            case "gated_norm":
                recurrent_sites.install_gated_norm(installer, operator)
            case "shared_gate":
                gate = recurrent_sites.sigmoid_globals(installer, operator)
                installer.put_forward(operator.module, replace_globals(operator.module, gate))
            case "rotary_table":
                operators.install_rotary_table(installer, operator)
            case "extension":
                operators.install_extension(installer, operator)
            case "attention":
                operators.install_rotary(installer, operator)
                self._install_attention(operator, original)

    def _install_attention(self, operator: Operator, original: str) -> None:
        write, _ = self._installer.site(operator.path, "kv_write", "kv_write")
        site, choice = self._installer.site(operator.path, "attention", "attention")
        if self.attention_mode == "module" and choice != STOCK:
            raise RecipeError(
                f"transformers' own attention can only be stock, plan {self.plan.name} wants "
                f"{choice} at "
                f"{site.name}; use the packed or paged engine"
            )
        attention = AttentionSite(self._tap, site, write, choice)
        self._installer.undo.append(
            attention.install(operator.module, self.attention_mode, original)
        )

    def _own_config(self) -> None:
        """Give the model configs of its own, so that no other model's attention changes."""
        copies: dict[int, Any] = {}
        for child in self.module.modules():
            config = child.__dict__.get("config")
            if config is None or not hasattr(config, "_attn_implementation"):
                continue
            if id(config) not in copies:
                copies[id(config)] = copy.deepcopy(config)
            child.__dict__["config"] = copies[id(config)]
            self._installer.undo.append(
                functools.partial(child.__dict__.__setitem__, "config", config)
            )

    def _wrap_base(self) -> None:
        """Tell the tap when a forward begins, and watch functions while somebody listens."""
        base = cast(nn.Module, cast(Any, self.module).base_model)
        if base is self.module:
            raise UncoveredSiteError(
                f"{type(base).__name__} has no base model apart from its head; use a *ForCausalLM "
                "model"
            )
        original = type(base).forward.__get__(base)

        @functools.wraps(original)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            shown = first_tensor(
                keywords.get("input_ids"), keywords.get("inputs_embeds"), *arguments
            )
            self._tap.begin_forward(
                (shown.shape[0], shown.shape[1]), keywords.get("position_ids")
            )
            if self._tap.listener is None or self._tap.auditing:
                return original(*arguments, **keywords)
            with Watch(self._tap, self._trail, self._inline_site):
                return original(*arguments, **keywords)

        self._installer.put_forward(base, forward)

    # -- watching --------------------------------------------------------------------------------

    def _follow(self, wanted: bool) -> None:
        if wanted and self._unhook is None:
            self._unhook = self._trail.follow(self.module).close
        elif not wanted and self._unhook is not None:
            self._unhook()
            self._unhook = None

    def _inline_site(self, path: str, part: str, op_class: str) -> Site | None:
        """The site of an inline add or product; made during the audit, looked up afterwards."""
        name = f"{path}#{part}"
        if self._tap.auditing and name not in self._inline:
            self._inline[name], _ = self._installer.site(path, op_class, part)
        return self._inline.get(name)

    def _audit(self) -> Audit:
        uncovered: list[Uncovered] = []
        modes = {child: child.training for child in self.module.modules()}
        self._tap.auditing = True
        self._follow(True)
        self.module.eval()
        try:
            with torch.no_grad(), Watch(self._tap, self._trail, self._inline_site, uncovered):
                self.module(**probe_inputs(self.module, self.attention_mode))
        finally:
            self._follow(False)
            self._tap.auditing = False
            for child, training in modes.items():
                child.training = training
        last = {site.name for site in self._head.sites}
        executed = [site for site in self._tap.executed.values() if site.name not in last]
        on_logits = [site for site in executed if site.name in self._inline and not site.path]
        if self._head.tail is None:
            uncovered += [Uncovered("", f"{site.part} on the logits") for site in on_logits]
        executed = [site for site in executed if site not in on_logits]
        seen = last | set(self._tap.executed)
        idle = [site for site in self._installer.sites if site.name not in seen]
        self.sites = (*executed, *idle, *self._head.sites)
        return Audit(tuple(executed), tuple(uncovered))


def apply_plan(module: nn.Module, plan: Plan, attention: AttentionMode = "context") -> Instrument:
    """Put ``plan`` onto a transformers ``*ForCausalLM``.

    attention: ``context``: the engine passes ``batch`` (an :class:`.attention.AttentionContext`) to
    the model; ``module``: transformers' own attention function, mask and cache, watched (stock
    attention only). Raises UncoveredSiteError (a site without a rule, a function outside every
    site), RecipeError (a contract that does not serve here, a plan already applied), ContractError.
    """
    check_plan(plan, (), _dtype(module), _device(module))
    instrument = Instrument(module, plan, attention)
    try:
        instrument.audit.check()
        check_plan(plan, instrument.sites, _dtype(module), _device(module))
    except BaseException:
        instrument.remove()
        raise
    return instrument


def is_applied(module: nn.Module) -> bool:
    """Whether a plan is on this model."""
    return _SLOT in module.__dict__


def find_sites(module: nn.Module, attention: AttentionMode = "context") -> tuple[Site, ...]:
    """All sites of a model, without contracts; :func:`.plan.plan_from` checks against them."""
    instrument = apply_plan(module, stock_plan(), attention)
    instrument.remove()
    return instrument.sites


def identify(module: nn.Module, spec: str = "this model") -> ModelIdentity:
    """Digests that say which model this is."""
    config = cast(Any, module).config
    return ModelIdentity(
        spec=spec,
        model_type=config.model_type,
        config_digest=config_digest(config),
        weights_root=weights_root(state_digest(module)),
    )


def apply(model: nn.Module, recipe: str | Path | Recipe) -> Instrument:
    """Apply a recipe (folder, file or object) to a loaded transformers model, in one call.

    The model then computes as the recipe says when called with packed rows (``position_ids``
    restarting at 0), or with right-padded ones, and ``use_cache=False``. Raises RecipeError when
    the recipe belongs to another model, dtype or device. Where one of TRL's trainers put its fused
    head onto the model, that computes as the recipe says too (:mod:`.fused_head`).
    """
    load_own_kernels(recipe)
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    plan = plan_from(loaded, (), _dtype(model), _device(model), identify(model))
    stock_attention = plan.rules.get("attention") == STOCK
    instrument = apply_plan(model, plan, "module" if stock_attention else "context")
    try:
        instrument.undo(fused_head.follow(model, instrument))
    except BaseException:
        instrument.remove()
        raise
    return instrument


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
