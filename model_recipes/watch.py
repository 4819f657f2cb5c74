"""The function watch: what a model computes between its recognised operators.

Residual adds and the like are written inline in a block's ``forward``; no module stands for them.
While a listener is set, or during the audit, a ``TorchFunctionMode`` sees every torch function that
runs outside a site and knows which module's ``forward`` is running. Adds and products of token rows
become sites (``model.layers.0#add_0``), numbered in the order in which their module computes them.
The tables below say what may run without being a site: data movement, and one exact IEEE operation
per element. Everything else is *uncovered* (:mod:`.audit` reports it).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from ..kernels.errors import UncoveredSiteError
from .sites import Site
from .tap import Tap, flatten_tokens

# Bits are moved, shaped, selected, created or described; never computed.
_MOVEMENT = """
    view view_as reshape reshape_as flatten unflatten transpose swapaxes swapdims permute movedim t
    contiguous clone detach alias expand expand_as broadcast_to broadcast_tensors repeat
    repeat_interleave squeeze unsqueeze cat concat stack split split_with_sizes chunk unbind
    tensor_split narrow select index_select gather take_along_dim getitem setitem index_put
    index_copy scatter masked_fill masked_select where roll flip pad tril triu diagonal copy fill
    zero zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full
    new_empty new_tensor tensor as_tensor scalar_tensor item tolist numpy size dim numel
    element_size stride storage_offset data_ptr is_contiguous is_floating_point is_complex nelement
    ndimension get_device requires_grad requires_grad_ len format hash repr register_hook has_names
    untyped_storage
"""

# One IEEE 754 operation per element with one rounding, or none: contract pointwise.ieee.v1.
ARITHMETIC = frozenset(("add", "sub", "mul", "div", "neg"))
_EXACT = """
    abs sign maximum minimum clamp relu eq ne lt le gt ge isnan isinf isfinite logical_and
    logical_or logical_not logical_xor any all bool int float double half bfloat16 long to type
    type_as cpu cuda ceil floor trunc
"""
MOVEMENT = frozenset(_MOVEMENT.split())
EXACT = frozenset(_EXACT.split())

_OTHER_NAMES = {
    "subtract": "sub", "rsub": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
    "truediv": "div", "rtruediv": "div", "itruediv": "div", "rdiv": "div", "idiv": "div",
    "radd": "add", "iadd": "add", "isub": "sub", "rmul": "mul", "imul": "mul", "negative": "neg",
    "invert": "logical_not", "and": "logical_and", "or": "logical_or",
}  # fmt: skip

# Operator class of an inline site. A difference is an add, a quotient a product: one rounding each.
_CLASSES = {"add": "add", "sub": "add", "mul": "mul", "div": "mul"}


@functools.lru_cache(maxsize=4096)
def function_name(function: Callable[..., Any]) -> str:
    """Plain name: ``add`` for ``Tensor.__iadd__``, ``add_`` and ``torch.add``."""
    name = getattr(function, "__name__", repr(function)).strip("_")
    return _OTHER_NAMES.get(name, name)


def is_in_place(function: Callable[..., Any]) -> bool:
    """``add_`` or ``__iadd__``."""
    name = getattr(function, "__name__", "")
    return name.startswith("__i") if name.endswith("__") else name.endswith("_")


def qualified_name(function: Callable[..., Any]) -> str:
    """The name by which a person finds the function (``torch.softmax``)."""
    return resolve_name(function) or getattr(function, "__qualname__", repr(function))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)


def is_exact(function: Callable[..., Any], arguments: Any, result: Any) -> bool:
    """Whether the tables cover a call: moved bits, one exact operation, or integers only."""
    qualified = qualified_name(function)
    if qualified.endswith(".__get__") or qualified.endswith(".__set__"):
        return True
    name = function_name(function)
    if name in MOVEMENT or name in EXACT or name in ARITHMETIC:
        return True
    involved = [*tensors_in(arguments), *tensors_in(result)]
    return not any(tensor.is_floating_point() or tensor.is_complex() for tensor in involved)


@dataclass(slots=True)
class Trail:
    """Which modules' forwards are running, and how many inline operations each has done so far."""

    paths: list[str] = field(default_factory=list[str])
    counts: list[dict[str, int]] = field(default_factory=list[dict[str, int]])

    @property
    def path(self) -> str:
        """Path of the innermost running module."""
        return self.paths[-1] if self.paths else ""

    def next_part(self, name: str) -> str:
        """``add_0``, ``add_1`` ... within the running module."""
        counts = self.counts[-1]
        count = counts.get(name, 0)
        counts[name] = count + 1
        return f"{name}_{count}"

    def follow(self, module: nn.Module, prefix: str = "") -> contextlib.ExitStack:
        """Hook every module below (and including) ``module``; close the result to unhook."""
        stack = contextlib.ExitStack()
        for path, child in module.named_modules(prefix=prefix):

            def enter(_module: nn.Module, _inputs: Any, path: str = path) -> None:
                self.paths.append(path)
                self.counts.append({})

            def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
                self.paths.pop()
                self.counts.pop()

            stack.callback(child.register_forward_pre_hook(enter).remove)
            stack.callback(child.register_forward_hook(leave, always_call=True).remove)
        return stack


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A torch function that ran outside every site and that no table covers."""

    path: str
    function: str


class Watch(TorchFunctionMode):
    """Sees torch functions outside sites; turns adds and products of token rows into site calls.

    site_for: gives the site of an inline operation (``path``, ``part``, class), or None when it is
    new.
    """

    def __init__(
        self,
        tap: Tap,
        trail: Trail,
        site_for: Callable[[str, str, str], Site | None],
        uncovered: list[Uncovered] | None = None,
    ) -> None:
        super().__init__()
        self.tap = tap
        self.trail = trail
        self.site_for = site_for
        self.uncovered = uncovered

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.tap.inside:
            return func(*args, **kwargs)
        name = function_name(func)
        shown, in_place = args, name in _CLASSES and is_in_place(func)
        if in_place:
            with self.tap.site_code():
                shown = (args[0].clone(), *args[1:])
        result = func(*args, **kwargs)
        if name not in _CLASSES and self.uncovered is None:
            return result
        with self.tap.site_code():
            if self.uncovered is not None and not self._covered(func, args, kwargs, result):
                self.uncovered.append(Uncovered(self.trail.path, qualified_name(func)))
            if name not in _CLASSES or not self._is_token_rows(result):
                return result
            site = self._site(name)
            graft = self._observe(site, func, shown, kwargs, result)
            if graft is not None and in_place:
                return result.copy_(graft)
        return result if graft is None else graft

    def _covered(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
        scaled = kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None
        return is_exact(func, (args, kwargs), result) and not (
            scaled and self._is_token_rows(result)
        )

    def _is_token_rows(self, result: Any) -> bool:
        if not isinstance(result, Tensor) or not result.is_floating_point() or not self.trail.paths:
            return False
        return result.dim() >= 3 and tuple(result.shape[:2]) == self.tap.batch_shape

    def _site(self, name: str) -> Site:
        path, part = self.trail.path, self.trail.next_part(name)
        site = self.site_for(path, part, _CLASSES[name])
        if site is None:
            raise UncoveredSiteError(
                f"{path}#{part} did not run when the plan was applied; apply the plan to the "
                "model as it "
                "is used (same mode, same architecture)"
            )
        return site

    def _observe(
        self, site: Site, func: Callable[..., Any], args: Any, kwargs: Any, result: Tensor
    ) -> Tensor | None:
        operands = {
            name: flatten_tokens(value) if self._is_token_rows(value) else value
            for name, value in zip(("a", "b"), args, strict=False)
        }
        shown = {
            name: operands[name]
            for name, value in zip(("a", "b"), args, strict=False)
            if self._is_token_rows(value)
        }

        def rerun(inputs: Mapping[str, Tensor]) -> Tensor:
            return func(*(inputs.get(name, value) for name, value in operands.items()), **kwargs)

        again = None if is_in_place(func) else rerun
        graft = self.tap.observe(site, shown, flatten_tokens(result), rerun=again)
        return None if graft is None else graft.reshape(result.shape)
