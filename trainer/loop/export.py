"""Export: the trained model as a transformers checkpoint folder, whole or absent."""

import contextlib
import shutil
from pathlib import Path
from typing import Any, cast

from ...kernels.errors import DiskError
from ...model_recipes.checkpoint import quiet_transformers
from ...model_recipes.models import LoadedModel


def export(model: LoadedModel, folder: Path) -> Path:
    """Write the folder (replacing an older export); ``load_model(folder)`` gives the same bits.

    No plan may be on the model: a plan computes with a changed copy of the config.
    """
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with quiet_transformers():
            cast(Any, model.module).save_pretrained(part)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(part)
        raise DiskError(
            f"cannot export to {folder}: {error}; free some space, then resume the finished run"
        ) from error
    return folder
