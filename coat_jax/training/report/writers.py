"""Where metrics go besides metrics.jsonl: TensorBoard, and Weights & Biases."""

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from coat_jax.errors import UserError
from coat_jax.writing import write_failures

Record = Mapping[str, float | int | str]


class Writer(Protocol):
    """Where records go."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int) -> None:
        """Opens the writer; its records of steps after `resume_step` no longer count."""

    def write(self, record: Record) -> None:
        """Writes one record."""

    def close(self) -> None:
        """Completes what is buffered."""


class TensorBoard:
    """Event files in FOLDER/tensorboard."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int) -> None:
        package = _package_of("tensorboard")
        self._summary = package.SummaryWriter(
            str(folder / "tensorboard"), purge_step=resume_step + 1
        )

    def write(self, record: Record) -> None:
        """Adds a point to the curve of each number."""
        for name, value in record.items():
            if name != "step" and not isinstance(value, str):
                self._summary.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Closes the event file."""
        self._summary.close()


class WandB:
    """A run on Weights & Biases, whose id there is in FOLDER/wandb_id.

    Its server deletes nothing: if a resumed run repeats a step, the first record of it stays.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int) -> None:
        package = _package_of("wandb")
        note = folder / "wandb_id"
        known = note.read_text("utf-8").strip() if note.is_file() else None
        self._run = package.init(
            dir=str(folder), name=folder.name, config=dict(config), id=known, resume="allow"
        )
        with write_failures(folder, note.name):
            note.write_text(self._run.id + "\n", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Logs the record at its step."""
        values = {name: value for name, value in record.items() if name != "step"}
        self._run.log(values, step=record["step"])

    def close(self) -> None:
        """Waits for what is not sent yet."""
        self._run.finish()


WRITERS: dict[str, type[Writer]] = {"tensorboard": TensorBoard, "wandb": WandB}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def require_installed(writers: Iterable[str]) -> None:
    """Raises UserError unless each of these writers has its package."""
    for name in writers:
        _package_of(name)


def _package_of(writer: str) -> ModuleType:
    package = PACKAGES[writer]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"The {writer} writer needs {package}: pip install 'coat_jax[{writer}]'."
        ) from error
