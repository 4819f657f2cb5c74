"""Which pinned algorithm serves which shape of class L, kept on disk between processes.

:mod:`.gpu_gemm` proves an algorithm at the very shape before it serves. What it found goes into one
file per storage type, beside the certificates and under their rules: it holds for one GPU, driver,
set of library versions and source code, and anything else voids it whole::

    ~/.cache/zero-mismatch/certificates/shapes/gemm.L.bfloat16.sm90.v1.json

``dispatch.recheck`` lists these files; with ``rerun`` every shape is proved again.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ..certificates import Environment, directory, environment, sources
from ..contract import get_contract, implementations
from ..errors import DiskError
from ..files import replace_whole

SCHEMA_VERSION = 1


class Served(BaseModel):
    """One shape. algorithm: cuBLASLt's name and its 64 bytes in hexadecimal; None: our own tile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    form: str
    m: int
    n: int
    k: int
    out: str
    bias: bool
    algorithm: str | None
    raw: str | None
    refused: tuple[str, ...]


class ShapeFile(BaseModel):
    """All shapes of one contract on one machine."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    contract: str
    environment: Environment
    sources: dict[str, str]
    shapes: list[Served]

    def void(self, here: Environment, code: dict[str, str]) -> str | None:
        """What has changed since it was written, or None while it holds."""
        now, then = here.model_dump(), self.environment.model_dump()
        changed = [
            f"{name}: {then[name]} is now {now[name]}" for name in now if now[name] != then[name]
        ]
        return "; ".join(changed + ["the code changed"] * (code != self.sources)) or None


def path_of(contract: str) -> Path:
    """The file of a contract."""
    return directory() / "shapes" / f"{contract}.json"


def read(path: Path) -> ShapeFile | str:
    """The file, or why it cannot be used."""
    try:
        found = ShapeFile.model_validate_json(path.read_bytes())
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValidationError as error:
        return f"is not a file of this version: {error.errors()[0]['msg']}"
    if found.schema_version != SCHEMA_VERSION or found.contract != path.stem:
        return f"holds schema version {found.schema_version} of {found.contract}"
    return found


def circumstances(contract: str) -> tuple[Environment, dict[str, str]]:
    """What a file of this machine and code says about itself."""
    found = get_contract(contract)
    return environment(found.device), sources(found, implementations(contract)[0])


def load(contract: str) -> dict[tuple[Any, ...], Served]:
    """Shapes that were proved here before, by (form, m, n, k, out, bias); empty where void."""
    found = read(path_of(contract))
    if isinstance(found, str) or found.void(*circumstances(contract)):
        return {}
    return {(s.form, s.m, s.n, s.k, s.out, s.bias): s for s in found.shapes}


def save(contract: str, shapes: dict[tuple[Any, ...], Served]) -> None:
    """Write these shapes beside what other processes have stored since."""
    here, code = circumstances(contract)
    merged = load(contract) | shapes
    path = path_of(contract)
    text = ShapeFile(
        contract=contract, environment=here, sources=code, shapes=list(merged.values())
    ).model_dump_json(indent=1)
    try:
        replace_whole(path, text)
    except OSError as error:
        raise DiskError(
            f"cannot store proved shapes in {path.parent}: {error.strerror}; make room there, or "
            "set XDG_CACHE_HOME to a writable directory"
        ) from error
