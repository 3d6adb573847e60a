"""The metrics of a run: one JSON object a line in metrics.jsonl, and optional writers.

    {"step": 20, "tokens": 40960, "seconds": 8.1, "loss": 3.214, "learning_rate": 0.0003, ...}

JSON has no NaN and no infinity: a loss that is not finite is written as null, which any JSON parser
accepts. Every line is one write, so that a killed run loses at most its last line.

A run that resumes from a checkpoint repeats the steps after it. Their old records are moved to
metrics.removed.jsonl first, so that the file looks like that of an uninterrupted run. If the file
is moved away while a run writes, as logs are rotated, a new one is begun.

A record that cannot be written, for example on a full disk, does not end the run at once: the loop
sees `failure` and saves a checkpoint, which contains the `unwritten` records for the run that
resumes.
"""

import contextlib
import json
import math
import os
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from coat_jax import agreement
from coat_jax.errors import UserError
from coat_jax.training.report.writers import WRITERS, Record, Writer
from coat_jax.writing import NotWritten, begun, is_at, write_failures

FILE = "metrics.jsonl"
REMOVED = "metrics.removed.jsonl"
BEGIN = b'{"step"'  # of every line that this module wrote


class Metrics:
    """Writes the records of a run, from its main process; others write nothing.

    Keys that `progress` and `plot` know: step, tokens and seconds since the run began, loss,
    learning_rate, gradient_norm, tokens_per_second, mfu (of 1), memory (bytes), skipped (steps),
    and after an evaluation held_out_loss and perplexity.

    Args:
        folder: the run's folder; it must exist.
        writers: more of them by name: "tensorboard", "wandb".
        config: the run's configuration, for the writers that show it.
        resume_step: the step of the checkpoint that the run resumes from. Records of later steps
            are moved away; 0, for a run from the beginning, moves all.
        recorded: the step of the last record that was in metrics.jsonl when it was saved.
        unwritten: records that the checkpoint has, because the run before could not write them.
        note: called with a line about records that were moved, and damage that was repaired.
    """

    def __init__(
        self,
        folder: Path,
        *,
        writers: Sequence[str] = (),
        config: Mapping[str, Any],
        resume_step: int = 0,
        recorded: int = 0,
        unwritten: Sequence[Mapping[str, Any]] = (),
        note: Callable[[str], object] = warnings.warn,
    ) -> None:
        self._writers: list[Writer | JSONLines] = []
        self._lines: JSONLines | None = None
        if agreement.is_main():
            others = [WRITERS[name](folder, config, resume_step) for name in writers]
            self._lines = JSONLines(folder, resume_step, recorded, note)
            for record in unwritten:
                self._lines.write(record)
            self._writers = [self._lines, *others]

    @property
    def failure(self) -> NotWritten | None:
        """Why records are not written any more; None if all is well, and on other processes."""
        return None if self._lines is None else self._lines.failure

    @property
    def recorded(self) -> int:
        """The step of the last record in metrics.jsonl; 0 without any, and on other processes."""
        return 0 if self._lines is None else self._lines.recorded

    @property
    def unwritten(self) -> list[dict[str, Any]]:
        """The records since then."""
        return [] if self._lines is None else self._lines.unwritten

    def write(self, record: Record) -> None:
        """Writes one record; it names its "step"."""
        for writer in self._writers:
            writer.write(record)

    def sync(self) -> None:
        """Makes all records survive a power failure."""
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        """Completes what is buffered."""
        for writer in self._writers:
            writer.close()


class JSONLines:
    """metrics.jsonl.

    Attributes:
        recorded: the step of the last record; 0 without any.
        failure: of the first record that could not be written; None if all is well.
        unwritten: that record and those after it.
    """

    def __init__(
        self,
        folder: Path,
        resume_step: int,
        recorded: int,
        note: Callable[[str], object],
    ):
        self._path = path = folder / FILE
        self._note = note
        self.recorded = 0
        self.failure: NotWritten | None = None
        self.unwritten: list[dict[str, Any]] = []
        with write_failures(folder, FILE):
            if path.is_file():
                self.recorded, later, lost = repair(path, resume_step)
                moved = f"moved to {REMOVED}"
                if later:
                    goes_on = (
                        f"goes on after step {resume_step:,}" if resume_step else "begins anew"
                    )
                    note(
                        f"There is no checkpoint of a later step, so the run {goes_on}: {later:,} "
                        f"records of later steps in {path} were {moved}."
                    )
                if lost:
                    note(f"{path} was damaged: {lost:,} lines were not records, and were {moved}.")
            if self.recorded < recorded:
                note(
                    f"{path} was damaged: it has lost the records of steps {self.recorded + 1:,} "
                    f"to {recorded:,}."
                )
            self._file = self._opened()

    def _opened(self) -> BinaryIO:
        if self._path.is_fifo():  # opening it would wait for a reader
            raise UserError(f"{self._path} is a pipe, and records need a file: remove it.")
        return self._path.open("ab", buffering=0)

    def write(self, record: Record) -> None:
        """Appends a line, whole or not at all."""
        finite = {key: value if _is_finite(value) else None for key, value in record.items()}
        if self.failure is None:
            try:
                with write_failures(self._path.parent, FILE):
                    self._append((json.dumps(finite, allow_nan=False) + "\n").encode())
            except NotWritten as error:
                self.failure = error
        if self.failure is None:
            self.recorded = int(record["step"])
        else:
            self.unwritten.append(finite)

    def _append(self, line: bytes) -> None:
        if not is_at(self._path, self._file):
            old, self._file = self._file, self._opened()
            old.close()
            self._note(f"{self._path} was removed or replaced: later records go to a new file.")
        end = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise

    def sync(self) -> None:
        """Waits until the disk has all lines, if it is one: /dev/null cannot be waited for."""
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            try:
                with write_failures(self._path.parent, FILE):
                    os.fsync(self._file.fileno())
            except NotWritten as error:
                self.failure = self.failure or error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl, in order; null is None.

    A last line without its end was torn when the run was killed, or is being written: it is left
    out.

    Raises:
        UserError: naming the file and the line, if a line is not a record.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = _record(line)
            if record is not None:
                yield record
            elif line.endswith(b"\n"):
                raise UserError(
                    f"{path}:{number} is not a record, a JSON object that names its step. Resuming "
                    "the run removes such lines."
                )


def repair(path: Path, step: int) -> tuple[int, int, int]:
    """Moves the records of later steps, and lines that are not records, to metrics.removed.jsonl.

    Returns the last step that is left (0 without any), and how many records and other lines were
    moved; a torn line at the end does not count.

    The file is replaced atomically; `writing.replace` would hold all of it in memory, and logs grow
    long. If a process was killed while it wrote a line, the next record may follow on the same
    line: that record is kept.
    """
    repaired, aside = path.with_suffix(".repaired"), path.with_name(REMOVED)
    last = later = lost = 0
    with path.open("rb") as old, begun(repaired) as new, aside.open("ab") as removed:
        for line in old:
            whole = line.strip()
            record = _record(whole)
            if record is None:
                lost += line.endswith(b"\n")
                removed.write(line)
                whole = whole[whole.rfind(BEGIN) :] if BEGIN in whole else b""
                record = _record(whole)
            if record is not None and record["step"] <= step:
                new.write(whole + b"\n")
                last = record["step"]
            elif record is not None:
                removed.write(whole + b"\n")
                later += 1
        for file in (new, removed):
            file.flush()
            os.fsync(file.fileno())
    repaired.replace(path)
    if not aside.stat().st_size:
        aside.unlink()
    return last, later, lost


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if the line is not a record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int
    return record if is_record else None


def _is_finite(value: float | int | str | None) -> bool:
    return value is None or isinstance(value, str) or math.isfinite(value)
