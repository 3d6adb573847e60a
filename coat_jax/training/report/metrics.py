"""The metrics of a run: one JSON object a line in metrics.jsonl, and optional writers.

    {"step": 20, "tokens": 40960, "seconds": 8.1, "loss": 3.214, "learning_rate": 0.0003, ...}

JSON has no NaN and no infinity: they are written as null. A run that resumes repeats the steps
after its checkpoint: their old records are moved to metrics.removed.jsonl first.
"""

import contextlib
import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax

from coat_jax import writing
from coat_jax.errors import UserError
from coat_jax.printable import amount
from coat_jax.writing import NotWritten, write_failures

FILE = "metrics.jsonl"
REMOVED = "metrics.removed.jsonl"
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # of the other writers
Record: TypeAlias = Mapping[str, Any]  # of numbers and strings


class Metrics:
    """Writes the records of a run, from its main process; others write nothing.

    A run resumes from the checkpoint of `resume_step`. A line about records that were moved goes to
    `note`.

    Attributes:
        failure: why a record could not be written, for example because the disk is full; None if
            all is well. All processes must stop for it, so it is not raised here.
    """

    def __init__(
        self,
        folder: Path,
        *,
        writers: Sequence[str] = (),
        config: Mapping[str, Any],
        resume_step: int = 0,
        note: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.failure: NotWritten | None = None
        self._path, self._is_main = folder / FILE, jax.process_index() == 0
        self._others: list[tuple[Any, Any]] = []  # functions that write and close
        if self._is_main:
            self._others = [WRITERS[name](folder, config, resume_step) for name in writers]
            with write_failures(folder, FILE):
                repair(self._path, resume_step, note)

    def write(self, record: Record) -> None:
        """Writes one record; it names its "step"."""
        if self._is_main:
            nulls = {k for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
            line = json.dumps(dict(record) | dict.fromkeys(nulls), allow_nan=False)
            # Opened each time: the file may be moved away, as logs are rotated.
            with self._keep_failure(), self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        for write, _ in self._others:
            write(record)

    def sync(self) -> None:
        """Makes all records survive a power failure."""
        if self._is_main and self._path.is_file():
            with self._keep_failure():
                writing.flush(self._path)

    def close(self) -> None:
        """Flushes the other writers."""
        for _, close in self._others:
            close()

    @contextlib.contextmanager
    def _keep_failure(self) -> Iterator[None]:
        """Keeps the first error of writing."""
        try:
            with write_failures(self._path.parent, FILE):
                yield
        except NotWritten as error:
            self.failure = self.failure or error


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a metrics.jsonl; null is None. A torn or damaged line is left out."""
    with path.open("rb") as file:
        yield from filter(None, map(_parse, file))


def repair(path: Path, step: int, note: Callable[[str], object]) -> None:
    """Moves records of later steps, and lines that are no records, to metrics.removed.jsonl."""
    if not path.is_file():
        return
    kept, removed = list[bytes](), list[bytes]()
    for line in path.read_bytes().splitlines():
        record = _parse(line)
        stays = record is not None and record["step"] <= step
        (kept if stays else removed).append(line + b"\n")
    if removed:
        with path.with_name(REMOVED).open("ab") as file:
            file.writelines(removed)
        writing.flush(path.with_name(REMOVED))
        lines = amount(len(removed), "later or damaged line")
        note(f"The run goes on after step {step:,}: {lines} of {path} moved to {REMOVED}.")
    writing.replace(path, b"".join(kept))


def _parse(line: bytes) -> dict[str, Any] | None:
    """Returns the record in a line; None if the line is not a record."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and type(record.get("step")) is int:
            return record
    return None


def tensorboard(folder: Path, config: Record, resume_step: int) -> tuple[Any, Any]:
    """Writes event files in FOLDER/tensorboard, with a curve for each number."""
    package: Any = importlib.import_module(PACKAGES["tensorboard"])
    summary = package.SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)

    def write(record: Record) -> None:
        for name, value in record.items():
            if name != "step" and not isinstance(value, str):
                summary.add_scalar(name, value, record["step"])

    return write, summary.close


def wandb(folder: Path, config: Record, resume_step: int) -> tuple[Any, Any]:
    """Writes a run on Weights & Biases, whose id there is in FOLDER/wandb_id.

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
