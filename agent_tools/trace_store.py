"""Run folders: a trace on disk, complete or not there at all.

    <folder>/meta.json         run, requests, executed schedule, column table, digests of the files
    <folder>/digests.npz       row table, samples, row digests, weight digests
    <folder>/blobs.safetensors kept tensors, if any

A folder is written under a temporary name and renamed when it is whole; a size that would pass the
byte budget or leave less than the free-disk floor is refused before the first byte. Loading checks
the BLAKE2b of every file, so a truncated or edited trace is an error, never another verdict.

    save_trace(trace, Path("runs/7/left"))
    trace = load_trace(Path("runs/7/left"))
"""

import dataclasses
import hashlib
import json
import os
import shutil
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..kernels.errors import DiskError, UsageError
from ..trainer.engines.base import Request, Sampling
from ..trainer.engines.schedule_file import from_json, to_json
from .trace import (
    DEFAULT_DISK_BYTES,
    Blob,
    Column,
    ColumnKey,
    RowTable,
    Samples,
    Trace,
)

SCHEMA_VERSION = 1
FREE_DISK_FLOOR = 1_000_000_000


def save_trace(
    trace: Trace,
    folder: Path,
    *,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    free_floor: int = FREE_DISK_FLOOR,
) -> Path:
    """Write ``trace`` as a new folder; DiskError before anything is written if there is no room."""
    if folder.exists():
        raise UsageError(f"{folder} exists already; name a new folder for this trace")
    arrays, names = _arrays(trace)
    blobs = {"|".join(map(str, key)): blob.tensor.contiguous() for key, blob in trace.blobs.items()}
    size = 1_000_000 + sum(part.nbytes for part in [*arrays.values(), *blobs.values()])
    partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_room(folder.parent, size, disk_bytes, free_floor)
        partial.mkdir()
        np.savez(partial / "digests.npz", **arrays)
        if blobs:
            save_file(blobs, partial / "blobs.safetensors")
        meta = _meta(trace, names) | {"files": {p.name: _blake2b(p) for p in partial.iterdir()}}
        (partial / "meta.json").write_text(json.dumps(meta))
        os.rename(partial, folder)
    except DiskError:
        raise
    except (OSError, SafetensorError) as error:
        raise DiskError(
            f"could not write the trace to {folder}: {error}; nothing was left there: free some "
            "disk space or name another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def load_trace(folder: Path) -> Trace:
    """Read a run folder; UsageError naming the damaged file if it isn't whole."""
    if not (folder / "meta.json").is_file():
        raise UsageError(f"{folder} is not a trace (no meta.json); name a folder that zm wrote")
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["schema_version"] != SCHEMA_VERSION:
            raise UsageError(
                f"{folder} has trace format {meta['schema_version']}, this version reads "
                f"{SCHEMA_VERSION}; run it again with this version"
            )
        for name, digest in meta["files"].items():
            if _blake2b(folder / name) != digest:
                raise UsageError(f"{folder / name} is damaged or was edited; run it again")
        with np.load(folder / "digests.npz") as stored:
            arrays = {name: stored[name] for name in stored.files}
        blobs = folder / "blobs.safetensors"
        return _assemble(meta, arrays, load_file(blobs) if blobs.is_file() else {})
    except UsageError:
        raise
    except (OSError, ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
        raise UsageError(f"the trace in {folder} cannot be read ({error}); run it again") from error


def _check_room(parent: Path, size: int, disk_bytes: int, free_floor: int) -> None:
    free = shutil.disk_usage(parent).free
    if size > disk_bytes:
        raise DiskError(
            f"the trace needs {size / 1e6:.0f} MB and the disk budget is {disk_bytes / 1e6:.0f} MB "
            f"({free / 1e6:.0f} MB are free); keep fewer tensors or raise the budget"
        )
    if free - size < free_floor:
        raise DiskError(
            f"the trace needs {size / 1e6:.0f} MB, {free / 1e6:.0f} MB are free in {parent} and "
            f"{free_floor / 1e6:.0f} MB must stay free; free some disk space or name another folder"
        )


def _blake2b(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _arrays(trace: Trace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays for the .npz, and the tables that say what is where in them."""
    arrays = {f"table/{f.name}": getattr(trace.table, f.name) for f in dataclasses.fields(RowTable)}
    for entry in dataclasses.fields(Samples):
        arrays[f"samples/{entry.name}"] = getattr(trace.samples, entry.name)
    spans: dict[int, int] = {}
    columns = []
    for index, (key, column) in enumerate(trace.columns.items()):
        span = spans.setdefault(id(column.rows), len(spans))
        arrays[f"rows/{span}"] = column.rows
        arrays[f"column/{index}"] = column.digests
        columns.append([*key, column.op_class, column.contract, column.dtype, column.shape, span])
    for index, digests in enumerate(trace.weights.values()):
        arrays[f"weight/{index}"] = digests
    for index, blob in enumerate(trace.blobs.values()):
        arrays[f"blob/{index}"] = blob.rows
    return arrays, {"columns": columns, "weights": list(trace.weights), "blobs": list(trace.blobs)}


def _meta(trace: Trace, names: dict[str, Any]) -> dict[str, Any]:
    return names | {
        "schema_version": SCHEMA_VERSION,
        "run": trace.run,
        "engine": trace.engine,
        "model": trace.model,
        "plan": trace.plan,
        "environment": trace.environment,
        "sites": trace.sites,
        "requests": [dataclasses.asdict(request) for request in trace.requests],
        "executed": to_json(trace.executed),
    }


def _assemble(meta: dict[str, Any], arrays: dict[str, Any], blobs: dict[str, Any]) -> Trace:
    columns = {}
    for index, (site, call, slot, *rest, shape, span) in enumerate(meta["columns"]):
        op_class, contract, dtype = rest
        columns[ColumnKey(site, call, slot)] = Column(
            op_class=op_class, contract=contract, dtype=dtype, shape=tuple(shape),
            rows=arrays[f"rows/{span}"], digests=arrays[f"column/{index}"],
        )  # fmt: skip
    keys = [ColumnKey(*key) for key in meta["blobs"]]
    return Trace(
        run=meta["run"], engine=meta["engine"], model=meta["model"], plan=meta["plan"],
        environment=meta["environment"], sites=tuple(meta["sites"]), columns=columns,
        requests=tuple(_request(entry) for entry in meta["requests"]),
        executed=from_json(meta["executed"]),
        table=RowTable(**_part(arrays, "table/")), samples=Samples(**_part(arrays, "samples/")),
        weights={name: arrays[f"weight/{i}"] for i, name in enumerate(meta["weights"])},
        blobs={
            key: Blob(rows=arrays[f"blob/{i}"], tensor=blobs["|".join(map(str, key))])
            for i, key in enumerate(keys)
        },
    )  # fmt: skip


def _part(arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def _request(entry: dict[str, Any]) -> Request:
    sampling = entry["sampling"] | {"stop_ids": tuple(entry["sampling"]["stop_ids"])}
    fields: dict[str, Any] = entry | {
        "tokens": tuple(entry["tokens"]),
        "sampled_mask": tuple(entry["sampled_mask"]),
        "turns": tuple((start, stop) for start, stop in entry["turns"]),
        "sampling": Sampling(**sampling),
    }
    return Request(**fields)
