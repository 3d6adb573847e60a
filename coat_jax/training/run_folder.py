"""The folder of a run: its files, and whether a run may begin or resume in it.

    lock                      held by the run's first process: see `run_lock`
    config.json               what was run
    generation_config.json    the token that ends a text, if the data names it
    metrics.jsonl             a record per step
    checkpoints/              states, with the position in the data and the config

A run resumes only with the config that it began with, except for the fields that `resume_rules`
lets change. That config is read from the newest checkpoint, whose checksums show whether it is
intact.
"""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from coat_jax import writing
from coat_jax.errors import UserError
from coat_jax.files import expanded, is_folder, status
from coat_jax.training import resume_rules
from coat_jax.training.checkpoint.companions import GENERATION
from coat_jax.training.checkpoint.step_folders import StepFolders
from coat_jax.training.checkpoint.weights import (
    CHECKPOINTS,
    CONFIG,
    config_in_checkpoint,
    is_run,
    parsed,
)
from coat_jax.training.config import TrainConfig
from coat_jax.training.report import metrics
from coat_jax.training.run_lock import lock
from coat_jax.writing import write_failures


class RunFolder:
    """The folder that a config names; only the first process claims it.

    Args:
        config: of the run.
        note: called with a line about what was damaged.
    """

    def __init__(self, config: TrainConfig, note: Callable[[str], object]):
        self.path = expanded(config.out)
        self.checkpoints = self.path / CHECKPOINTS
        self._config, self._note = config, note
        self._lock: TextIO | None = None

    def begins(self) -> bool:
        """Whether there is no checkpoint that the run would resume from."""
        return not self._config.resume or StepFolders(self.checkpoints).newest_record() is None

    def claim(self) -> list[str]:
        """Claims the folder for this run; returns what has changed since its earlier config.

        Writes nothing yet: other checks may still refuse the run before `write_config`.

        Raises:
            UserError: if another process is using it, or it holds a model, or another run, or one
                that has taken more steps.
        """
        self._take()
        self._require_no_model()
        if not self._config.resume and self._holds_a_run():
            self._require_nothing_is_read_from_it()
            self._move_away()
            before = self._lock
            self._take()
            if before is not None:
                before.close()
        saved = self._saved()
        newest = StepFolders(self.checkpoints).newest_record()
        changed = []
        if saved is not None:
            changed = resume_rules.changes(self._config, saved, begun=newest is not None)
        done = 0 if newest is None else newest["step"]
        if done > self._config.total_steps:
            raise UserError(
                f"{self.path} holds a run that has taken {done:,} steps, and total_steps="
                f"{self._config.total_steps:,}. Raise it, choose another folder with --out, or "
                "begin anew with --resume false, which moves that run out of the way."
            )
        return changed

    def _require_no_model(self) -> None:
        """Raises if the folder holds a model that no run wrote."""
        path = self.path / CONFIG
        if self.checkpoints.exists() or not path.is_file():
            return
        found = parsed(path)
        if found is not None and "architectures" in found and not is_run(found):
            raise UserError(
                f"{self.path} holds a model in Hugging Face's format, not a run: choose another "
                "--out."
            )

    def _require_nothing_is_read_from_it(self) -> None:
        """Raises if the run begins from the folder that would be moved out of its way."""
        source = self._config.init_from
        if source is not None and expanded(source).resolve().is_relative_to(self.path.resolve()):
            raise UserError(
                f"init_from={source} is in the folder {self.path}, which --resume false would move "
                "out of the way: choose another folder with --out."
            )

    def write_config(self, *, end_of_text: int | None = None) -> None:
        """Writes config.json, and generation_config.json unless there is one."""
        self._write(CONFIG, resume_rules.to_json(self._config))
        if end_of_text is not None and not (self.path / GENERATION).exists():
            self._write(GENERATION, {"eos_token_id": end_of_text})

    def release(self) -> None:
        """Releases the lock, so that other runs may use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _write(self, name: str, content: dict[str, Any]) -> None:
        with write_failures(self.path, name):
            writing.replace(self.path / name, json.dumps(content, indent=2) + "\n")

    def _take(self) -> None:
        if status(self.path) and not is_folder(self.path):
            raise UserError(
                f"{self.path} is a file, and a run needs a folder: choose another --out."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.path, self._note)

    def _holds_a_run(self) -> bool:
        return any((self.path / name).exists() for name in (CONFIG, metrics.FILE, CHECKPOINTS))

    def _saved(self) -> dict[str, Any] | None:
        """The config of the run in the folder; None if there is no run."""
        saved = config_in_checkpoint(self.path)
        path = self.path / CONFIG
        if saved is not None or not path.is_file():
            return saved
        saved = parsed(path)
        if saved is None:
            self._note(f"{path} is damaged, and no checkpoint says what was run. It is replaced.")
        return saved

    def _move_away(self) -> None:
        """Moves the run that is in the folder to a free name beside it."""
        moved = _free_name(self.path)
        try:
            if self.path.samefile(Path.cwd()):
                raise OSError(errno.EBUSY, "It is the current folder")
            self.path.rename(moved)
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.EXDEV):
                raise
            raise UserError(
                f"{self.path} holds a run, which cannot be moved to {moved.name} out of the way: "
                f"{error.strerror}. Choose another folder with --out."
            ) from error


def _free_name(folder: Path) -> Path:
    """The folder's name with the first free number appended."""
    folder = folder.absolute()
    number = 1
    while os.path.lexists(moved := folder.with_name(f"{folder.name}.{number}")):
        number += 1
    return moved
