"""An engine's weights: which version is installed, and how a new one gets in.

New weights are copied into the parameters in place: storage addresses stay, and torch's version
counters tell every cache of packed weights that its copy is old. Everything is checked before the
first tensor is touched, and the digests are taken again from what is installed.

    publish = weights.stage({"model.embed_tokens.weight": tensor, ...}, version=1)
    weights.install(publish)
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels import bits
from ...kernels.errors import MisalignedError, UsageError
from ...model_recipes.models import LoadedModel
from ...model_recipes.state import named_state, state_digest, weights_root
from .base import Publish


class Weights:
    """The installed version of a model's weights, and staged ones waiting for their event."""

    def __init__(self, loaded: LoadedModel, *, version: int = 0) -> None:
        self.loaded = loaded
        self.version = version
        self.digests = state_digest(loaded.module)
        self._staged: dict[tuple[int, str], dict[str, Tensor]] = {}

    @property
    def root(self) -> str:
        """One digest over all installed tensors."""
        return weights_root(self.digests)

    def stage(self, weights: Mapping[str, Tensor], version: int) -> Publish:
        """Keep a copy of complete new weights until a schedule's Publish installs them.

        Names as in ``named_parameters()``; a tied tensor may appear under any or all of its names.
        """
        complete = self._check(weights, version)
        digests = {name: bits.digest_tensor(tensor) for name, tensor in complete.items()}
        publish = Publish(version=version, digest=weights_root(digests))
        copies = {name: tensor.detach().clone() for name, tensor in complete.items()}
        self._staged[version, publish.digest] = copies
        return publish

    def require(self, publish: Publish) -> None:
        """Raise unless ``publish`` names staged weights, or the installed ones once more."""
        key = (publish.version, publish.digest)
        if key not in self._staged and publish.digest != self.root:
            raise UsageError(
                f"weights {publish.digest} for version {publish.version} are not here; "
                "call the engine's stage(weights, version) first and use the Publish it returns"
            )

    def install(self, publish: Publish) -> None:
        """Copy the weights that ``publish`` names into the model and check what arrived."""
        self.require(publish)
        staged = self._staged.pop((publish.version, publish.digest), None)
        if staged is not None:
            with torch.no_grad():
                for name, parameter in named_state(self.loaded.module).items():
                    parameter.copy_(staged[name])
            self.digests = state_digest(self.loaded.module)
            if self.root != publish.digest:
                raise MisalignedError(
                    f"version {publish.version} was installed as {self.root}, not as "
                    f"{publish.digest}; load the model again"
                )
        self.version = publish.version

    def _check(self, weights: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
        """All tensors under their first names; tied names must agree in every bit."""
        if version <= self.version:
            raise UsageError(
                f"version {version} does not exceed the installed version {self.version}; "
                f"use {self.version + 1} or more"
            )
        state, aliases = named_state(self.loaded.module), self.loaded.aliases
        first_name = {other: first for first, others in aliases.items() for other in others}
        unknown = sorted(name for name in weights if name not in state and name not in first_name)
        if unknown:
            raise UsageError(f"the model has no tensor {unknown[0]!r}; publish its own weights")
        complete: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            first = first_name.get(name, name)
            installed = state[first]
            if (tensor.shape, tensor.dtype) != (installed.shape, installed.dtype):
                raise UsageError(
                    f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, the model's is "
                    f"{installed.dtype} {tuple(installed.shape)}; convert it before publishing"
                )
            bits.check_finite(tensor, name)
            if first in complete and not bits.equal(complete[first], tensor):
                raise UsageError(
                    f"tensors {first!r} and {name!r} are tied in the model but differ here; "
                    "publish one of them"
                )
            complete[first] = tensor
        missing = sorted(state.keys() - complete.keys())
        if missing:
            raise UsageError(
                f"{len(missing)} tensor(s) are missing, first {missing[0]!r}; publish all weights"
            )
        return complete
