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


_STACKED_BYTES = 1 << 28


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


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Digest (32 hex digits) of every tensor: :func:`.bits.digest_tensor` of each.

    On a GPU, tensors of one size go together: one by one, starting kernels takes most of the time.
    """
    from ..kernels import bits
    from ..kernels.reference.digest import fold_shape

    alike: dict[tuple[torch.dtype, int], list[str]] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.is_cuda and tensor.numel():
            alike.setdefault((tensor.dtype, tensor.numel()), []).append(name)
        else:
            found[name] = bits.digest_tensor(tensor)
    for (dtype, elements), names in alike.items():
        most = max(1, _STACKED_BYTES // (elements * dtype.itemsize))
        for first in range(0, len(names), most):
            part = names[first : first + most]
            rows = torch.stack([tensors[name].detach().reshape(-1) for name in part])
            for name, lanes in zip(part, bits.digest_rows(rows).tolist(), strict=True):
                unsigned = lanes[0] % (1 << 64), lanes[1] % (1 << 64)
                folded = fold_shape(unsigned, tuple(tensors[name].shape))
                found[name] = f"{folded[0]:016x}{folded[1]:016x}"
    return {name: found[name] for name in tensors}


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
