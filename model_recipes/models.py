"""From a model's name to a loaded transformers module, its tokenizer, its config and its digests.

    load_model("tiny:llama")                         offline, seeded random weights (see tiny.py)
    load_model("smollm2-135m", dtype="bfloat16")     real weights, fetched once (see smollm2.py)
    load_model("/models/llama")                      a transformers checkpoint folder
    load_model("org/name")                           only from the local Hugging Face cache

``zm fetch`` and ``zm inspect`` exercise it. Every weight is checked to be finite. No plan is
applied here; nothing is downloaded here.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..kernels.errors import CapabilityError, UsageError
from . import checkpoint, custom_code, smollm2, tiny
from .attention import keep_softcap
from .schema import ModelIdentity
from .state import aliases, check_finite, config_digest, state_digest, weights_root

DTypeName = Literal["float32", "bfloat16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in memory.

    spec: what the user wrote. module: a transformers ``*ForCausalLM`` in eval mode. tokenizer: None
    for ``tiny:`` models and folders without one. config: the transformers config.
    """

    spec: str
    module: nn.Module
    tokenizer: Any
    config: Any

    @functools.cached_property
    def state_digest(self) -> dict[str, str]:
        """Digest of every named tensor as loaded."""
        return state_digest(self.module)

    @functools.cached_property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Other names of tied tensors."""
        return aliases(self.module)

    @property
    def config_digest(self) -> str:
        """Digest of the config."""
        return config_digest(self.config)

    @property
    def weights_root(self) -> str:
        """One digest over all tensors."""
        return weights_root(self.state_digest)

    @property
    def identity(self) -> ModelIdentity:
        """Which model this is: what a recipe for it must name."""
        return ModelIdentity(
            spec=self.spec,
            model_type=self.config.model_type,
            config_digest=self.config_digest,
            weights_root=self.weights_root,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(self.module.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.module.parameters()).device


def torch_dtype(name: str) -> torch.dtype:
    """``"float32"`` or ``"bfloat16"`` as a torch dtype."""
    if name not in _DTYPES:
        raise UsageError(f"dtype {name!r} is not supported; use {' or '.join(_DTYPES)}")
    return _DTYPES[name]


def _check_device(device: str) -> torch.device:
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"{device!r} is no device name; use cpu or cuda") from error
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise CapabilityError("no CUDA device is available to torch here; use --device cpu")
    if wanted.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is not supported; use cpu or cuda")
    return wanted


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_model(
    spec: str, *, dtype: DTypeName = "float32", device: str = "cpu", seed: int = 0
) -> LoadedModel:
    """Load a model by folder, alias, ``tiny:`` name (with ``seed``) or cached hub id.

    Raises CheckpointError (missing, truncated, foreign), NonFiniteError (names tensor and index),
    CapabilityError (no such device, or the package with the real weights is not installed).
    """
    wanted, place = torch_dtype(dtype), _check_device(device)
    tokenizer = None
    if spec.startswith(tiny.PREFIX):
        module = tiny.build(spec, dtype=wanted, seed=seed)
    elif spec.startswith(custom_code.PREFIX):
        module = custom_code.load_code_model(spec, dtype=wanted, seed=seed)
    else:
        folder = Path(spec)
        if spec == smollm2.NAME:
            folder = smollm2.fetch(spec)
        elif not folder.exists() and not spec.startswith(("/", ".", "~")) and spec.count("/") == 1:
            folder = checkpoint.hub_folder(spec)
        module = checkpoint.load_checkpoint(folder.expanduser(), dtype=wanted)
        tokenizer = _load_tokenizer(folder.expanduser())
    check_finite(module, spec)
    keep_softcap(module)
    return LoadedModel(
        spec=spec, module=module.to(place), tokenizer=tokenizer, config=module.config
    )
