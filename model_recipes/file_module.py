"""Run one Python file as a module, once per process and content.

A model that brings its code and a recipe that brings its operators both name the module after the
content's digest, so that an edited file is another module and an unedited one is not run twice.

    module = file_module(Path("models/heron/modeling_heron.py"), "zeromismatch_model_code_1f2e...")
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def file_module(path: Path, name: str) -> ModuleType:
    """The module of that name, run from ``path`` if it is not there; raises what its code raises.

    A file whose code raised leaves no module behind.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
