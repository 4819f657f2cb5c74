"""New weights into live tensors: whole or not at all, in bounded time, at the addresses they have.

    live = LiveWeights(tensors, cleared=engine_drops_its_caches)
    offer = live.stage(weights, version=3)      # checked and digested; nothing changes yet
    live.install(offer, seconds=30)             # pause first: readers must not run meanwhile

A reader between two installations sees one version: installing copies every tensor over the live
one, reads all of them back, and compares digests with those of the offer. Whatever goes wrong on
the way (a tensor that does not arrive, the time limit, a reader's caches that cannot be dropped)
puts the old bytes back, and the old version serves on. Captured CUDA graphs remember addresses, so
a tensor that moved refuses the installation before a byte is written.

Handshake: an offer names its version and the digest over all tensors; what is installed afterwards
must have that digest, and versions only grow. ``pytest tests/trainer/publication`` exercises it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import bits
from ...kernels.errors import BudgetError, CapabilityError, MisalignedError, UsageError
from ...model_recipes.state import Digests, digests_of, weights_root
from ..engines.base import Publish
from .flat import copy_all

Cleared = Callable[[], bool]
SECONDS = 120.0
POLL_SECONDS = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Complete new weights, digested; holds references, not copies: keep them still."""

    publish: Publish
    tensors: Mapping[str, Tensor]
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What an installation took. copy_seconds: until every copy was
    under way; seconds: with every check."""

    publish: Publish
    tensors: int
    nbytes: int
    copy_seconds: float
    seconds: float


class LiveWeights:
    """The tensors that a reader computes with, by name.

    cleared: drops everything the reader derived from its weights (keys and values, packed copies)
    and says whether that worked.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, cleared: Cleared, version: int = 0
    ) -> None:
        self._live = dict(tensors)
        self._cleared = cleared
        self._places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self.version = version
        self.digests = digests_of(self._live)
        self._old: dict[str, Tensor] | None = None  # room for the old bytes, kept between uses

    @property
    def root(self) -> str:
        """One digest over all installed tensors."""
        return weights_root(self.digests)

    def moved(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names whose storage is no longer where it was."""
        return [
            name
            for name, place in self._places.items()
            if name not in tensors or tensors[name].data_ptr() != place
        ]

    def empty_copy(self) -> dict[str, Tensor]:
        """Room for a complete set of weights, contiguous, of the live tensors' kinds."""
        return {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            for name, tensor in self._live.items()
        }

    def require_fit(self, kinds: Mapping[str, tuple[str, tuple[int, ...]]], version: int
                    ) -> None:  # fmt: skip
        """UsageError unless these (dtype, shape) by name are a newer version of the live tensors.

        live.require_fit({"model.norm.weight": ("bfloat16", (576,)), ...}, 3)
        """
        if version <= self.version:
            raise UsageError(
                f"version {version} does not exceed the installed version {self.version}; use "
                f"{self.version + 1} or more"
            )
        foreign = sorted(kinds.keys() - self._live.keys())
        missing = sorted(self._live.keys() - kinds.keys())
        if foreign or missing:
            what = f"no tensor {foreign[0]!r}" if foreign else f"needs {missing[0]!r}"
            raise UsageError(
                f"{len(foreign)} foreign and {len(missing)} missing tensor(s): the model "
                f"{what}; publish exactly its own weights"
            )
        for name, given in kinds.items():
            live = described(self._live[name])
            if given != live:
                raise UsageError(
                    f"tensor {name!r} is {given[0]} {given[1]}, the reader's is {live[0]} "
                    f"{live[1]}; convert it before publishing"
                )

    def stage(self, weights: Mapping[str, Tensor], version: int) -> Offer:
        """Check a complete set of weights; UsageError for a missing, foreign or unfit tensor."""
        self.require_fit({name: described(each) for name, each in weights.items()}, version)
        taken = Digests(weights)
        digests = taken.read()
        require_finite(weights, taken)
        publish = Publish(version=version, digest=weights_root(digests))
        return Offer(publish=publish, tensors=dict(weights), digests=digests)

    @torch.no_grad()
    def install(self, offer: Offer, *, seconds: float = SECONDS) -> Installed:
        """Put an offer in; the old weights are back if this raises.

        Raises BudgetError (longer than ``seconds``), MisalignedError (what arrived is not what was
        offered), CapabilityError (caches not dropped), UsageError (an old or foreign offer).
        """
        if offer.publish.version <= self.version or offer.tensors.keys() != self._live.keys():
            raise UsageError(
                f"the offer of version {offer.publish.version} does not fit version "
                f"{self.version}; stage it again"
            )
        began = time.perf_counter()
        deadline = began + seconds
        old = self._old = self._old or self.empty_copy()
        copy_all(old, self._live)
        try:
            if time.perf_counter() > deadline:
                raise _late(offer)
            copy_all(self._live, offer.tensors)
            copied = time.perf_counter()
            arrived = Digests(self._live)  # read back from where the reader reads
            if not self._cleared():  # while the device takes them
                raise CapabilityError(
                    "the reader kept caches of its old weights; stop or preempt its requests, then "
                    "publish again"
                )
            self._confirm(offer, arrived, deadline)
        except BaseException:
            copy_all(self._live, old)
            self._cleared()
            raise
        self.version, self.digests = offer.publish.version, dict(offer.digests)
        return Installed(
            publish=offer.publish,
            tensors=len(self._live),
            nbytes=sum(tensor.nbytes for tensor in self._live.values()),
            copy_seconds=copied - began,
            seconds=time.perf_counter() - began,
        )

    def _confirm(self, offer: Offer, arrived: Digests, deadline: float) -> None:
        """Every tensor has the digest that was offered, and in time."""
        if not wait_for(arrived, deadline):
            raise _late(offer)
        found = arrived.read()
        odd = [name for name, digest in offer.digests.items() if found[name] != digest]
        if odd:
            raise MisalignedError(
                f"version {offer.publish.version}: {len(odd)} tensor(s) arrived as something else, "
                f"first {odd[0]!r}; the old version serves on, publish again"
            )
        if time.perf_counter() > deadline:
            raise _late(offer)


def _late(offer: Offer) -> BudgetError:
    return BudgetError(
        f"publishing version {offer.publish.version} took longer than it may; the old version "
        "serves on: raise the limit, or find out what holds the device"
    )


def wait_for(taken: Digests, deadline: float) -> bool:
    """Until the device has taken the digests; False where that is too late."""
    while not taken.done():
        if time.perf_counter() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def described(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape), as they are offered."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def require_finite(tensors: Mapping[str, Tensor], taken: Digests) -> None:
    """NonFiniteError names tensor and index. taken: the tensors' digests, read already."""
    whole = [torch.isfinite(tensors[name]).all() for name in taken.unjudged]
    if taken.nonfinite or (whole and not bool(torch.stack(whole).all())):
        for name, tensor in tensors.items():
            bits.check_finite(tensor, name)
