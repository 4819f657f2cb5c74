"""A transformers checkpoint on disk: is it whole, causal, and does it fit its config?

Everything that can be said from the config and the safetensors headers is said before a single
weight is read: missing folder or file, a file shorter than its header promises, tensors of another
shape, missing or unexpected tensors, a config that is no causal language model, quantised weights.
Then transformers loads it (offline), and what it reports is checked once more.

    module = load_checkpoint(Path("smollm2"), dtype=torch.float32)

A hub id is looked up in the local Hugging Face cache only; nothing here opens a connection.
"""

import contextlib
import json
import re
import struct
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..kernels.errors import CheckpointError
from .state import aliases

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def hub_folder(name: str) -> Path:
    """The snapshot folder of a hub id in the local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"{name!r} is neither a folder nor a model in the local Hugging Face cache; download "
            "it with "
            f"`hf download {name}` where there is a network, or use smollm2-135m or tiny:llama"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing; a checkpoint folder needs it: fetch or export it again"
        )
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); fetch or export it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; fetch or export it again")
    return content


def read_config(folder: Path) -> Any:
    """The folder's config as a transformers object; raises unless it is a plain causal model."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    fields = _read_json(folder / "config.json")
    where = f"{folder / 'config.json'}"
    if fields.get("auto_map"):
        raise CheckpointError(
            f"{where} wants code from the checkpoint (auto_map); use a model that transformers "
            "has built in"
        )
    if fields.get("quantization_config"):
        raise CheckpointError(
            f"{where}: the weights are quantised; dequantise to bfloat16 and save again"
        )
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{where}: model_type {model_type!r} is unknown to this transformers; upgrade it or "
            "use another model"
        )
    config_class = CONFIG_MAPPING[model_type]
    names = fields.get("architectures") or []
    causal = any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names) or not names
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING or not causal:
        raise CheckpointError(
            f"{where}: {', '.join(names) or model_type} is not a causal language model; use a "
            "*ForCausalLM one"
        )
    try:
        return config_class.from_dict(_with_floats(fields))
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{where} does not make a {model_type} config: {reason}; correct it"
        ) from error


def _with_floats(value: Any) -> Any:
    """transformers writes infinities and NaN as ``{"__float__": "Infinity"}`` and reads them back
    only from files (Nemotron-H's time_step_limit has one)."""
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        if entries.keys() == {"__float__"}:
            return float(entries["__float__"])
        return {key: _with_floats(each) for key, each in entries.items()}
    if isinstance(value, list):
        return [_with_floats(each) for each in cast("list[Any]", value)]
    return value


def safetensors_header(path: Path) -> dict[str, Any]:
    """``{tensor: {"dtype", "shape", "data_offsets"}}``; raises when the size is wrong."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise CheckpointError(
                f"{path} is truncated inside its header ({size} bytes); fetch it again"
            )
        try:
            header = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path} is no safetensors file ({error}); fetch it again"
            ) from error
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != size:
        what = "truncated" if size < end else "longer than its header says"
        raise CheckpointError(
            f"{path} is {what}: {size} bytes, its header promises {end}; fetch it again"
        )
    return header


def read_headers(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the folder's safetensors files."""
    if (folder / INDEX).is_file():
        listed = _read_json(folder / INDEX).get("weight_map", {})
        files = sorted({folder / str(name) for name in listed.values()})
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {', '.join(missing)} missing, listed in {INDEX}; fetch it again"
            )
    elif (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    else:
        other = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            path.name for path in folder.glob("*.gguf")
        )
        found = f" ({', '.join(other)} is not read: convert to safetensors)" if other else ""
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}{found}; fetch or export the checkpoint again"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        shapes |= {name: tuple(entry["shape"]) for name, entry in safetensors_header(path).items()}
    return shapes


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _complain(folder: Path, missing: list[str], unexpected: list[str], shapes: list[str]) -> None:
    parts = [
        f"{what}: {_listing(sorted(names))}"
        for what, names in (
            ("wrong shape", shapes),
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
        )
        if names
    ]
    if parts:
        raise CheckpointError(
            f"{folder} does not fit its config.json; {'; '.join(parts)}. "
            "Export the checkpoint again, or use the config that belongs to it"
        )


def check_against_config(folder: Path, config: Any, found: dict[str, tuple[int, ...]]) -> None:
    """Compare the headers with the tensors of the config's model; builds no weights."""
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes = [
        f"{name} {list(found[name])} where the config has {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if get_checkpoint_conversion_mapping(config.model_type) is not None:
        _complain(folder, [], [], shapes)  # names are rewritten while loading; checked afterwards
        return
    present = set(found)
    for first, others in aliases(model).items():
        group = {first, *others}
        if group & present:
            present |= group
    ignored = [
        *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        r"rotary_emb\.inv_freq",
    ]
    unexpected = [
        name
        for name in set(found) - set(expected)
        if not any(re.search(rule, name) for rule in ignored)
    ]
    _complain(folder, list(set(expected) - present), unexpected, shapes)


@contextlib.contextmanager
def quiet_transformers() -> Generator[None]:
    """Without transformers' progress bars (ours say more)."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_checkpoint(folder: Path, *, dtype: torch.dtype) -> nn.Module:
    """Check a checkpoint folder and load it; bf16 weights are widened exactly for fp32."""
    from transformers import AutoModelForCausalLM

    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; give a checkpoint folder, smollm2-135m or tiny:llama"
        )
    config = read_config(folder)
    check_against_config(folder, config, read_headers(folder))
    with quiet_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    module, info = loaded
    mismatched = [str(key) for key in info.get("mismatched_keys", ())]
    _complain(folder, list(info["missing_keys"]), list(info["unexpected_keys"]), mismatched)
    return module.eval()
