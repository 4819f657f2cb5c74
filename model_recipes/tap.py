"""The tap: where every operator site hands its call to whoever listens.

One tap per instrumented model. A site's code runs *inside* the tap, so that the function watch
(:mod:`.watch`) knows that what it sees there is the site's own business, and so is whatever the
listener computes. With no listener a site costs one attribute test.

Tensors are shown one row per token: ``[B, S, ...]`` becomes ``[B * S, ...]``.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..kernels.errors import ContractError
from .sites import Site, SiteCall, SiteListener

Run = Callable[[Mapping[str, Tensor]], Tensor]


class Tap:
    """Call counts of a step, the batch shape of the running forward, and the listener."""

    def __init__(self) -> None:
        self.listener: SiteListener | None = None
        self.auditing = False
        self.executed: dict[str, Site] = {}
        self.forced: Mapping[str, Tensor] = {}  # choices by site, one row per token: replayed
        self.routings: dict[str, object] = {}  # the Routing of every router's choice, by site
        self.batch_shape: tuple[int, int] | None = None
        self.position_ids: Tensor | None = None  # of the running forward, where it was given any
        self.context: object | None = (
            None  # of a forward without an engine; made by its first layer
        )
        self._counts: dict[str, int] = {}
        self._depth = 0

    @property
    def inside(self) -> bool:
        """Whether a site's own code (or the listener's) is running."""
        return self._depth > 0

    @property
    def watching(self) -> bool:
        """Whether sites must announce themselves at all."""
        return self.listener is not None or self.auditing

    def begin_forward(
        self, batch_shape: tuple[int, int], position_ids: Tensor | None = None
    ) -> None:
        """A forward pass of the base model starts: calls count from zero again."""
        self.batch_shape = batch_shape
        self.position_ids = position_ids
        self.context = None
        self._counts.clear()

    def begin_rows(self, site: Site) -> None:
        """This site runs on rows of its own next (a block of the head): calls count from 0."""
        self._counts.pop(site.name, None)

    def site_code(self) -> contextlib.AbstractContextManager[object]:
        """Everything in this block belongs to a site; the function watch does not see it.

        Function modes are switched off inside: a kernel asks its tensors for shapes and strides
        often enough for the watch to double its time.
        """
        return _SiteCode(self) if self.watching else _NOT_WATCHED

    def enter_site(self, step: int) -> None:
        """Count how deep in sites' own code the forward is: +1 on the way in, -1 on the way out."""
        self._depth += step

    def observe(
        self,
        site: Site,
        inputs: Mapping[str, Tensor],
        output: Tensor,
        *,
        weights: tuple[str, ...] = (),
        rerun: Run | None = None,
        definition: Run | None = None,
    ) -> Tensor | None:
        """Show one call, already in rows; returns what to put in the output's place, if any."""
        if self.auditing:
            self.executed.setdefault(site.name, site)
        if self.listener is None:
            return None
        count = self._counts.get(site.name, 0)
        self._counts[site.name] = count + 1
        with self.site_code(), torch.no_grad():
            graft = self.listener(
                SiteCall(
                    site=site,
                    call=count,
                    inputs={name: _shown(tensor) for name, tensor in inputs.items()},
                    output=_shown(output),
                    weights=weights,
                    rerun=rerun,
                    definition=definition,
                )
            )
        if graft is not None and (graft.shape != output.shape or graft.dtype != output.dtype):
            raise ContractError(
                f"graft for {site.name} is {graft.dtype} {list(graft.shape)}, the output is "
                f"{output.dtype} "
                f"{list(output.shape)}; return a tensor of the output's shape and dtype, or None"
            )
        return graft

    def through(
        self,
        site: Site,
        run: Run,
        inputs: Mapping[str, Tensor],
        *,
        weights: tuple[str, ...] = (),
        flat: bool = False,
        alone: bool = True,
        definition: Run | None = None,
    ) -> Tensor:
        """Run a site and show it; returns its output, or the graft in its shape.

        Tensors are ``[B, S, ...]`` (or per head, before or after the heads were moved forward), or
        already one row per token where ``flat`` (as are floating-point matrices). alone: it reads
        no state, so that it can run again on other rows. definition: see SiteCall.
        """
        with self.site_code():
            output = run(inputs)
        # The input tells: a kernel's output is contiguous whatever its input was.
        first = next(iter(inputs.values()))
        flat = flat or (first.dim() == 2 and first.is_floating_point())
        by_head = not flat and self._heads_first(first)
        rows = _as_is if flat else head_rows if by_head else flatten_tokens
        graft = self.observe(
            site,
            {name: rows(tensor) for name, tensor in inputs.items()},
            rows(output),
            weights=weights,
            rerun=run if alone else None,
            definition=definition,
        )
        if graft is None:
            return output
        return from_head_rows(graft, output.shape[0]) if by_head else graft.reshape(output.shape)

    def _heads_first(self, tensor: Tensor) -> bool:
        """Whether a tensor is ``[B, heads, S, D]`` rather than ``[B, S, heads, D]``."""
        if tensor.dim() != 4 or self.batch_shape is None:
            return False
        tokens = self.batch_shape[1]
        if tensor.shape[1] == tensor.shape[2] == tokens:
            return tensor.stride(1) < tensor.stride(2)
        return tensor.shape[1] != tokens and tensor.shape[2] == tokens


class _SiteCode:
    """See :meth:`Tap.site_code`; a class, because it is entered for every site of every step."""

    __slots__ = ("functions", "tap")

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.functions = torch._C.DisableTorchFunction()  # pyright: ignore[reportPrivateUsage]

    def __enter__(self) -> None:
        self.tap.enter_site(1)
        self.functions.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.functions.__exit__(*error)
        self.tap.enter_site(-1)


_NOT_WATCHED = contextlib.nullcontext()


def _shown(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def flatten_tokens(tensor: Tensor) -> Tensor:
    """``[B, S, ...]`` -> ``[B * S, ...]``."""
    return tensor.flatten(0, 1)


def head_rows(tensor_BHSD: Tensor) -> Tensor:
    """``[B, heads, S, D]`` -> ``[B * S, heads, D]``."""
    return tensor_BHSD.transpose(1, 2).flatten(0, 1)


def from_head_rows(tensor_THD: Tensor, batch: int) -> Tensor:
    """``[B * S, heads, D]`` -> ``[B, heads, S, D]``."""
    return tensor_THD.unflatten(0, (batch, -1)).transpose(1, 2)
