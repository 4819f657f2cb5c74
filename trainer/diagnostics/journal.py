"""Where records go: ``metrics.jsonl`` in the run's folder, and TensorBoard's files beside it.

    with Journal(folder) as journal:
        record = journal.write(facts)
    tensorboard --logdir FOLDER/tensorboard

Both open with the first update. A resumed run's first update has a version: records from that
version on are dropped, also a last line that was cut off, so that each update is there once.
Records come back by :func:`read_journal`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import ValidationError

from ...kernels.errors import CapabilityError, DiskError, UsageError
from ...kernels.files import replace_whole
from ..loop.evaluation import Evaluation
from ..loop.records import UpdateFacts
from .record import UpdateRecord, record_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE = "metrics.jsonl"
EVENTS = "tensorboard"


class Journal:
    """See the module. on_record: called with each record after it was written."""

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool = True,
        on_record: Callable[[UpdateRecord], None] | None = None,
    ) -> None:
        self.folder, self.path = folder, folder / FILE
        self._tensorboard, self._on_record = tensorboard, on_record
        self._d3: list[float] = []
        self._file: TextIO | None = None
        self._events: SummaryWriter | None = None

    def write(self, facts: UpdateFacts) -> UpdateRecord:
        """Measure an update and write its record, one whole line."""
        file = self._file or self._open(facts.batch.version)
        record = record_of(facts, self._d3)
        try:
            file.write(record.model_dump_json() + "\n")
            file.flush()
        except OSError as error:
            raise _no_room(self.path, error) from error
        self._d3.append(record.d3)
        if self._events is not None:
            for name, value in scalars(record).items():
                self._events.add_scalar(name, value, record.version)
            self._events.flush()
        if self._on_record is not None:
            self._on_record(record)
        return record

    def evaluated(self, found: Evaluation) -> None:
        """An evaluation's curves; the run folder has its line already."""
        if self._events is not None:
            for name in ("pass_at_1", "mean_at_k", "reward"):
                self._events.add_scalar(f"held_out/{name}", getattr(found, name), found.version)

    def close(self) -> None:
        """Close both files."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, start: int) -> TextIO:
        """Keep the records before ``start``, drop the others."""
        records = read_journal(self.folder) if self.path.exists() else []
        kept = [record for record in records if record.version < start]
        self._d3 = [record.d3 for record in kept]
        try:
            replace_whole(self.path, "".join(each.model_dump_json() + "\n" for each in kept))
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise _no_room(self.path, error) from error
        if self._tensorboard:
            self._events = _open_events(self.folder / EVENTS, start)
        return self._file


def _no_room(path: Path, error: OSError) -> DiskError:
    return DiskError(f"cannot write {path}: {error.strerror}; free some disk, then resume")


def read_journal(folder: Path) -> list[UpdateRecord]:
    """All records of a run, in order. A last line without its end (a killed run) is left out."""
    path = folder / FILE
    if not path.is_file():
        raise UsageError(f"{path} does not exist; give the folder of a `zm train` run")
    records: list[UpdateRecord] = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            records.append(UpdateRecord.model_validate_json(line))
        except ValidationError as error:
            raise UsageError(
                f"line {number} of {path} is no update record ({error.errors()[0]['msg']}); "
                "restore the file, or start the run again"
            ) from error
    return records


def scalars(record: UpdateRecord) -> dict[str, float]:
    """A record as TensorBoard's curves: plain numbers, those of a gap under its name."""
    found: dict[str, float] = {}
    plain: dict[str, Any] = json.loads(record.model_dump_json())
    for name, value in plain.items():
        if name in ("kernel", "total"):
            found |= {f"{name}/{part}": float(number) for part, number in value.items()}
        elif isinstance(value, int | float) and name != "version":
            group = "seconds" if name.endswith("_seconds") else "update"
            found[f"{group}/{name}"] = float(value)
    return found


def _open_events(folder: Path, start: int) -> "SummaryWriter":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise CapabilityError(
            "TensorBoard is not installed: run `make install`, or pip install "
            "'zero-mismatch[train]'"
        ) from error
    return SummaryWriter(str(folder), purge_step=start or None)
