"""What a model holds: its named tensors, their digests, and whether they are finite.

The named state is every parameter and every persistent buffer under its ``named_parameters()``
name. Tied tensors (one storage under two names) are listed once; :func:`aliases` gives the other
names.

    state_digest(module)  ->  {"model.embed_tokens.weight": "5be1...", ...}
    aliases(module)       ->  {"model.embed_tokens.weight": ("lm_head.weight",)}

Two runs may be compared only when these digests agree; a flipped weight bit is placed by them.
Left out: activations (sites), and anything about files (see :mod:`.checkpoint`).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.errors import NonFiniteError

# Keys of a config that say where it came from or how it runs, not what the model computes.
_VOLATILE = frozenset(
    (
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "attn_implementation",
        "use_cache",
    )
)


_JUDGED = (torch.bfloat16, torch.float16, torch.float32)


def _all_names(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child.named_buffers(recurse=False):
            transient = child._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            if name not in transient:
                yield f"{prefix}.{name}" if prefix else name, buffer


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; a tied tensor under its first name only."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in _all_names(module):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state


def aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each tied tensor: first name -> its other names. Models without tying give ``{}``."""
    names: dict[int, list[str]] = {}
    for name, tensor in _all_names(module):
        names.setdefault(id(tensor), []).append(name)
    return {first: tuple(rest) for first, *rest in names.values() if rest}


def parameter_names(module: nn.Module) -> dict[int, str]:
    """``id(parameter) -> name``; a tied tensor has its first name."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def state_digest(module: nn.Module) -> dict[str, str]:
    """Digest (32 hex digits) of every named tensor."""
    return digests_of(named_state(module))


class Digests:
    """Digests of named tensors: :func:`.bits.digest_tensor` of each, under way until :meth:`read`.

    On a GPU all of them are taken by one launch, which nobody waits for before reading. nonfinite,
    once read: names with NaN or infinities, found in the same pass; unjudged: names that were not
    looked at in that way (the processor's memory, integers, fp64).
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        from ..kernels import bits

        self._names = list(tensors)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._found: dict[str, str] = {}
        self._many: list[tuple[list[str], Any]] = []
        self.nonfinite: list[str] = []
        self.unjudged: list[str] = []
        on_gpu: dict[torch.device, list[str]] = {}
        for name, tensor in tensors.items():
            together = tensor.is_cuda and tensor.numel() and tensor.is_contiguous()
            if not (together and tensor.dtype in _JUDGED):
                self.unjudged.append(name)
            if together:
                on_gpu.setdefault(tensor.device, []).append(name)
            else:
                self._found[name] = bits.digest_tensor(tensor)
        for device, names in on_gpu.items():
            from ..kernels.gpu.digest_many import digest_many

            self._many.append((names, digest_many([tensors[name] for name in names], device)))

    def done(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return all(many.done() for _, many in self._many)

    def read(self) -> dict[str, str]:
        """32 hex digits of every tensor, in the tensors' order."""
        from ..kernels.reference.digest import fold_shape

        while self._many:
            names, many = self._many.pop()
            for name, lanes, spoiled in zip(names, *many.read(), strict=True):
                first, second = fold_shape(lanes, self._shapes[name])
                self._found[name] = f"{first:016x}{second:016x}"
                if spoiled:
                    self.nonfinite.append(name)
        return {name: self._found[name] for name in self._names}


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Digest (32 hex digits) of every tensor: :func:`.bits.digest_tensor` of each."""
    return Digests(tensors).read()


def weights_root(digests: Mapping[str, str]) -> str:
    """One digest over all tensors' digests and names; independent of their order."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(digests):
        hasher.update(f"{name}\0{digests[name]}\n".encode())
    return hasher.hexdigest()


def config_digest(config: Any) -> str:
    """Digest of what a config says about the computation, not of paths or versions."""
    fields = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
    text = json.dumps(fields, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_finite(module: nn.Module, source: str) -> None:
    """Raise :class:`NonFiniteError` naming the first tensor and index that is NaN or infinite."""
    for name, tensor in named_state(module).items():
        if not tensor.is_floating_point():
            continue
        finite = torch.isfinite(tensor)
        if bool(finite.all()):
            continue
        flat = int((~finite).flatten().to(torch.uint8).argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)]
        count = int((~finite).sum())
        raise NonFiniteError(
            f"{source}: weight {name}{index} is {tensor[tuple(index)].item()} "
            f"({count} non-finite value(s) in this tensor); fetch or export the checkpoint again"
        )
