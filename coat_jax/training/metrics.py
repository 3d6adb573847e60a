"""What a run says of itself: one JSON object a line in metrics.jsonl, and optional writers.

    {"step": 20, "tokens": 40960, "seconds": 8.1, "loss": 3.214, "learning_rate": 0.0003, ...}

JSON has no NaN and no infinity: a loss that is not finite is written as null, which any reader of
JSON takes. Every line is flushed, so that a killed run loses at most its last one.

A run that resumes from a checkpoint repeats the steps after it. Their old records are cut
first, so that the file reads like that of a run which nobody disturbed.
"""

import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from coat_jax.training import distributed

FILE = "metrics.jsonl"

Record = Mapping[str, float | int | str]


class Metrics:
    """Writes the records of a run, from its main process; others write nothing.

    Keys that `progress` and `plot` know: step, tokens and seconds since the run began, loss,
    learning_rate, gradient_norm, tokens_per_second, mfu (of 1), memory (bytes), skipped (steps),
    and after an evaluation held_out_loss and perplexity.

    Args:
        folder: the run's folder; it must exist.
        writers: more of them by name: "tensorboard", "wandb".
        config: the run's configuration, for the writers that show it.
        resume_step: the step of the checkpoint that the run resumes from, 0 to begin again; None
            for a new run, whose folder must have no records.
    """

    def __init__(
        self,
        folder: Path,
        *,
        writers: Sequence[str] = (),
        config: Mapping[str, Any],
        resume_step: int | None = None,
    ) -> None:
        unknown = [name for name in writers if name not in WRITERS]
        if unknown:
            raise ValueError(f"No writer of metrics is called {unknown[0]!r}: {', '.join(WRITERS)}")
        self._writers: list[Writer] = []
        if distributed.is_main():
            others = [WRITERS[name](folder, config, resume_step) for name in writers]
            self._writers = [JSONLines(folder, config, resume_step), *others]

    def write(self, record: Record) -> None:
        """Writes one record; it names its "step"."""
        if not isinstance(record.get("step"), int):
            raise ValueError(f"A record needs a whole number as its step: {dict(record)}")
        for writer in self._writers:
            writer.write(record)

    def close(self) -> None:
        """Completes what is buffered."""
        for writer in self._writers:
            writer.close()


class Writer(Protocol):
    """Where records go."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Opens it; what it holds of steps after `resume_step` is void."""

    def write(self, record: Record) -> None:
        """Writes one record."""

    def close(self) -> None:
        """Completes what is buffered."""


class JSONLines:
    """metrics.jsonl."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        path = folder / FILE
        if resume_step is None:
            if path.exists() and path.stat().st_size:
                raise FileExistsError(
                    f"{path} has records of an earlier run: resume it, or choose another folder."
                )
        elif path.exists():
            cut(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Appends a line."""
        finite = {key: value if _is_finite(value) else None for key, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Event files in FOLDER/tensorboard."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        package = _require("tensorboardX", extra="tensorboard")
        purge = None if resume_step is None else resume_step + 1
        self._summary = package.SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, record: Record) -> None:
        """Adds a point to the curve of each number."""
        for name, value in record.items():
            if name != "step" and not isinstance(value, str):
                self._summary.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Closes the event file."""
        self._summary.close()


class WandB:
    """A run on Weights & Biases, found again by the name in FOLDER/wandb_id.

    Its server cuts nothing: it keeps the first record of a step, which a resumed run repeats.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        package = _require("wandb", extra="wandb")
        note = folder / "wandb_id"
        known = (
            note.read_text("utf-8").strip() if resume_step is not None and note.exists() else None
        )
        self._run = package.init(
            dir=str(folder), name=folder.name, config=dict(config), id=known, resume="allow"
        )
        note.write_text(self._run.id + "\n", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Logs the record at its step."""
        values = {name: value for name, value in record.items() if name != "step"}
        self._run.log(values, step=record["step"])

    def close(self) -> None:
        """Waits for what is not sent yet."""
        self._run.finish()


WRITERS: dict[str, type[Writer]] = {"tensorboard": TensorBoard, "wandb": WandB}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl, in order; null is None.

    A last line without its end was torn when the run was killed, or is being written: it is left
    out.

    Raises:
        ValueError: naming the file and the line, if a line is no record.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is not JSON: {error}") from error
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise ValueError(f"{path}:{number} is no record: it names no step.")
            yield record


def cut(path: Path, step: int) -> None:
    """Removes the records of later steps, atomically: either file is whole at any moment."""
    kept = path.with_suffix(".kept")
    with kept.open("w", encoding="utf-8") as file:
        for record in read(path):
            if record["step"] <= step:
                file.write(json.dumps(record, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    kept.replace(path)


def _is_finite(value: float | int | str) -> bool:
    return isinstance(value, str) or math.isfinite(value)


def _require(package: str, *, extra: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"The {extra} writer needs {package}: pip install 'coat_jax[{extra}]'."
        ) from error
