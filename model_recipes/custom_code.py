"""Models whose code comes with them: ``code:FOLDER``.

    load_code_model("code:models/riverstone", dtype=torch.float32)

The folder is as a hub gives it: ``config.json`` with ``auto_map``, one modelling file, and either
``model.safetensors`` or, for reduced models, ``"seeded_weights"``: then the weights are drawn as
for ``tiny:`` models. The prefix is the user's consent: the folder's Python code **runs in this
process**. A plain folder with ``auto_map`` stays refused.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..kernels.errors import CheckpointError
from .file_module import file_module
from .tiny import draw

PREFIX = "code:"
MODULE_PREFIX = "zeromismatch_model_code_"


def load_code_model(spec: str, *, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Build the model that the folder's own code defines, in eval mode."""
    folder = Path(spec.removeprefix(PREFIX)).expanduser()
    fields = _fields(folder)
    config_class, model_class = _classes(folder, fields)
    try:
        config = config_class.from_dict(fields)
        module = model_class._from_config(config, dtype=dtype)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: its code does not build a model ({error})") from error
    weights = folder / "model.safetensors"
    if weights.is_file():
        _load(module, weights, folder)
    else:
        _draw(module, fields, folder, seed)
    return module.eval()


def _fields(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; `code:` wants a folder with code of its own")
    try:
        fields = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error}); fetch it again") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("auto_map"), dict):
        raise CheckpointError(f"{file} has no auto_map; without code of its own, drop `code:`")
    return fields


def _classes(folder: Path, fields: dict[str, Any]) -> tuple[Any, Any]:
    places = [fields["auto_map"].get(name) for name in ("AutoConfig", "AutoModelForCausalLM")]
    found: list[Any] = []
    for place in places:
        file, _, name = str(place).partition(".")
        path = folder / f"{file}.py"
        if not file.isidentifier() or not path.is_file():
            raise CheckpointError(
                f"{folder}: auto_map names {place!r}, and there is no {path.name}; fetch it again"
            )
        module = _module(path)
        if not hasattr(module, name):
            raise CheckpointError(f"{path} defines no {name}; fetch it again")
        found.append(getattr(module, name))
    return found[0], found[1]


def _module(path: Path) -> Any:
    """The folder's file as a module; the same content is run once per process."""
    digest = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    try:
        return file_module(path, f"{MODULE_PREFIX}{digest}")
    except (ImportError, NameError, SyntaxError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be run: {error}") from error


def _load(module: nn.Module, weights: Path, folder: Path) -> None:
    from safetensors.torch import load_file

    tied = set(getattr(module, "_tied_weights_keys", None) or ())
    missing, unexpected = module.load_state_dict(load_file(weights), strict=False)
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        names = ", ".join([*missing, *unexpected][:3])
        raise CheckpointError(f"{folder}: weights and code do not fit ({names}); fetch both again")


def _draw(module: nn.Module, fields: dict[str, Any], folder: Path, seed: int) -> None:
    if not fields.get("seeded_weights"):
        raise CheckpointError(f"{folder} has no model.safetensors; fetch it again")
    hidden = int(fields["hidden_size"])
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(draw(seed, name, tuple(parameter.shape), hidden, {"": 1.0}))
