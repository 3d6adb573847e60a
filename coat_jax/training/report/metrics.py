"""The metrics of a run: one JSON object a line in metrics.jsonl, and optional writers.

    {"step": 20, "tokens": 40960, "seconds": 8.1, "loss": 3.214, "learning_rate": 0.0003, ...}

JSON has no NaN and no infinity: they are written as null. A run that resumes repeats the steps
after its checkpoint: their old records are moved to metrics.removed.jsonl first.

A record that cannot be written, for example on a full disk, does not end the run at once: the loop
sees `failure` and saves a checkpoint, which contains the `unwritten` records.
"""

import contextlib
import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from coat_jax import multihost, writing
from coat_jax.errors import UserError
from coat_jax.writing import NotWritten, write_failures

FILE = "metrics.jsonl"
REMOVED = "metrics.removed.jsonl"
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # of the other writers
Record: TypeAlias = Mapping[str, Any]  # of numbers and strings


class Metrics:
    """Writes the records of a run, from its main process; others write nothing.

    A run resumes from the checkpoint of `resume_step`, which has `recorded` and `unwritten`. A line
    about records that were moved or lost goes to `note`.

    Attributes:
        recorded: the step of the last record in metrics.jsonl; 0 without any.
        failure: why a record could not be written; None if all is well.
        unwritten: that record and those after it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        writers: Sequence[str] = (),
        config: Mapping[str, Any],
        resume_step: int = 0,
        recorded: int = 0,
        unwritten: Sequence[Record] = (),
        note: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.recorded = 0
        self.failure: NotWritten | None = None
        self.unwritten: list[Record] = []
        self._path = folder / FILE
        self._others: list[tuple[Any, Any]] = []  # functions that write and close
        if not multihost.is_main():
            return
        self._others = [WRITERS[name](folder, config, resume_step) for name in writers]
        with write_failures(folder, FILE):
            self.recorded = repair(self._path, resume_step, note)
        if self.recorded < recorded:
            lost = f"{self.recorded + 1:,} to {recorded:,}"
            note(f"{self._path} was damaged: it has lost the records of steps {lost}.")
        for record in unwritten:
            self._write_line(record)

    def write(self, record: Record) -> None:
        """Writes one record; it names its "step"."""
        if multihost.is_main():
            self._write_line(record)
        for write, _ in self._others:
            write(record)

    def sync(self) -> None:
        """Makes all records survive a power failure."""
        with self._failures():
            if multihost.is_main() and self._path.is_file():
                writing.flush(self._path)

    def close(self) -> None:
        """Flushes the other writers."""
        for _, close in self._others:
            close()

    def _write_line(self, record: Record) -> None:
        infinite = {k for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
        finite = dict(record) | dict.fromkeys(infinite)
        if self.failure is None:
            with self._failures():
                append(self._path, json.dumps(finite, allow_nan=False))
                self.recorded = record["step"]
        if self.failure is not None:
            self.unwritten.append(finite)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Keeps the first error of writing in the block."""
        try:
            with write_failures(self._path.parent, FILE):
                yield
        except NotWritten as error:
            self.failure = self.failure or error


def append(path: Path, line: str) -> None:
    """Appends a line, whole or not at all, also if the file was moved away as logs are rotated."""
    rest = f"{line}\n".encode()
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a metrics.jsonl; null is None.

    A last line without its end is left out: it is being written, or the run was killed.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = _parse(line)
            if record is not None:
                yield record
            elif line.endswith(b"\n"):
                raise UserError(
                    f"{path}:{number} is not a record, a JSON object that names its step. Resuming "
                    "the run removes such lines."
                )


def repair(path: Path, step: int, note: Callable[[str], object]) -> int:
    """Moves records of later steps, and lines that are no records, to metrics.removed.jsonl.

    Returns the last step that is left; 0 without any.
    """
    if not path.is_file():
        return 0
    last = later = 0
    kept, removed = [], []
    for line in path.read_bytes().splitlines():
        record = _parse(line)
        if record is not None and record["step"] <= step:
            kept.append(line + b"\n")
            last = record["step"]
        else:
            removed.append(line + b"\n")
            later += record is not None
    if removed:
        with path.with_name(REMOVED).open("ab") as file:
            file.writelines(removed)
        writing.flush(path.with_name(REMOVED))
    writing.replace(path, b"".join(kept))
    moved = f"in {path} were moved to {REMOVED}."
    if later:
        goes_on = f"goes on after step {step:,}" if step else "begins anew"
        note(f"Without a later checkpoint, the run {goes_on}: {later:,} later records {moved}")
    if later < len(removed):
        note(f"{len(removed) - later:,} lines that are not records {moved}")
    return last


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if the line is not a record."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and type(record.get("step")) is int:
            return record
    return None


# --- Other writers: a function that writes a record, and one that closes ---------------------


def tensorboard(folder: Path, config: Record, resume_step: int) -> tuple[Any, Any]:
    """Event files in FOLDER/tensorboard, with a curve for each number."""
    package: Any = importlib.import_module(PACKAGES["tensorboard"])
    summary = package.SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)

    def write(record: Record) -> None:
        for name, value in record.items():
            if name != "step" and not isinstance(value, str):
                summary.add_scalar(name, value, record["step"])

    return write, summary.close


def wandb(folder: Path, config: Record, resume_step: int) -> tuple[Any, Any]:
    """A run on Weights & Biases, whose id there is in FOLDER/wandb_id.

    Its server deletes nothing: if a resumed run repeats a step, the first record of it stays.
    """
    package: Any = importlib.import_module(PACKAGES["wandb"])
    note = folder / "wandb_id"
    known = note.read_text("utf-8").strip() if note.is_file() else None
    run = package.init(
        dir=str(folder), name=folder.name, config=dict(config), id=known, resume="allow"
    )
    with write_failures(folder, note.name):
        note.write_text(f"{run.id}\n", encoding="utf-8")

    def write(record: Record) -> None:
        values = {name: value for name, value in record.items() if name != "step"}
        run.log(values, step=record["step"])

    return write, run.finish


WRITERS = {"tensorboard": tensorboard, "wandb": wandb}


def require_installed(writers: Iterable[str]) -> None:
    """Raises UserError unless each of these writers has its package."""
    for name in writers:
        try:
            importlib.import_module(PACKAGES[name])
        except ImportError as error:
            raise UserError(
                f"The {name} writer needs {PACKAGES[name]}: pip install 'coat_jax[{name}]'."
            ) from error
