"""Weight gradients over several micro-batches as one chain, so that the split changes no bit.

Autograd adds finished sums (``.grad +=``), and (a + b) + (c + d) has other bits than ((a + b) + c)
+ d. Inside :meth:`Accumulators.micro_batch` the backward of the contract operators continues, in
place, the fp32 chains that earlier micro-batches left, and hands autograd nothing for that weight:

    sums = Accumulators(dict(model.named_parameters()))
    for part in micro_batches:
        with sums.micro_batch():
            loss(part).backward()
    sums.gradient("model.embed_tokens.weight")      # fp32, the bits of one whole batch

A weight with two uses (an embedding that is also the head) has a chain for each; they are added at
the end in the order of their names. An operator that does not know this module leaves its gradient
in ``.grad``, which is added last: then the split does matter. On a GPU weights of products, norms,
convolutions and gates continue in whole blocks of 8,192 tokens (``linear/gpu.py``), and embeddings
add a finished sum for each micro-batch: fp32 all the way, but the split shows. One weight used
twice by the same operator within a micro-batch would interleave two chains, and is refused.
"""

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from .errors import CapabilityError


class _Active(threading.local):
    """A CPU's backward runs in the thread that calls it: each thread has its own."""

    accumulators: "Accumulators | None" = None


_ACTIVE = _Active()
_EVERYWHERE: list["Accumulators"] = []


class Accumulators:
    """See the module. ``parameters``: by name; a tied one under one name."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self._names = {tensor.data_ptr(): name for name, tensor in self.parameters.items()}
        self._chains: dict[tuple[str, str], Tensor] = {}
        self._used: set[tuple[str, str]] = set()

    @contextmanager
    def micro_batch(self) -> Generator[None]:
        """Backward passes in this block continue the chains."""
        self._used.clear()
        before, _ACTIVE.accumulators = _ACTIVE.accumulators, self
        _EVERYWHERE.append(self)
        try:
            yield
        finally:
            _EVERYWHERE.remove(self)
            _ACTIVE.accumulators = before

    def chain(self, weight: Tensor, use: str) -> Tensor | None:
        """fp32, the weight's shape: where ``use`` of ``weight`` adds; None for a foreign weight.

        A view that only drops dimensions of 1 (a convolution's weight) is the weight itself.
        """
        name = self._names.get(weight.data_ptr())
        if name is None or _shape(self.parameters[name]) != _shape(weight):
            return None
        key = (name, use)
        if key in self._used:
            raise CapabilityError(
                f"{use} uses {name} twice in one forward, so its gradient would depend on the "
                "micro-batches; run the backward outside of Accumulators.micro_batch()"
            )
        self._used.add(key)
        if key not in self._chains:
            self._chains[key] = torch.zeros(
                self.parameters[name].shape, dtype=torch.float32, device=weight.device
            )
        return self._chains[key].view(weight.shape)

    def gradient(self, name: str) -> Tensor | None:
        """fp32 sum of all micro-batches so far; None where nothing arrived."""
        parts = [self._chains[key] for key in sorted(self._chains) if key[0] == name]
        own = self.parameters[name].grad
        if own is not None:
            parts.append(own.float())
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def clear(self) -> None:
        """Start a new update."""
        for chain in self._chains.values():
            chain.zero_()
        for tensor in self.parameters.values():
            tensor.grad = None


def _shape(weight: Tensor) -> list[int]:
    return [size for size in weight.shape if size != 1]


def chain_of(weight: Tensor, use: str) -> Tensor | None:
    """The chain that a backward continues for ``weight``, or None: return the gradient then."""
    active = _ACTIVE.accumulators
    if active is not None:
        return active.chain(weight, use)
    if weight.is_cuda:  # its backward runs in a thread of the device; the weight names its owner
        chains = (each.chain(weight, use) for each in list(_EVERYWHERE))
        return next((chain for chain in chains if chain is not None), None)
    return None
