"""The folder of a run: its files, and whether a run may begin or resume in it.

    lock                      locked by the run's first process; its text says which process that is
    config.json               what was run
    generation_config.json    the token that ends a text, if the data names it
    metrics.jsonl             a record per step
    checkpoints/              states, with the position in the data and the config

A run resumes only as `resume_rules` allows, from the config in the newest checkpoint, whose
checksums show whether it is intact. The other processes of a distributed run need no lock: they
write only when the first one tells them to.
"""

import datetime
import errno
import fcntl
import itertools
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from coat_jax import files, writing
from coat_jax.errors import UserError
from coat_jax.printable import printable
from coat_jax.training import resume_rules
from coat_jax.training.checkpoint import weights
from coat_jax.training.checkpoint.step_folders import StepFolders
from coat_jax.training.checkpoint.tokenizer_files import GENERATION
from coat_jax.training.config import TrainConfig, to_json
from coat_jax.training.report import metrics
from coat_jax.writing import write_failures

LOCK = "lock"
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # no locks there


class RunFolder:
    """The folder that a config names; `note` is called with a line about what is damaged in it."""

    def __init__(self, config: TrainConfig, note: Callable[[str], object]):
        self.path = Path(config.out)
        self.checkpoints = self.path / weights.CHECKPOINTS
        self._steps = StepFolders(self.checkpoints)
        self._config, self._note = config, note
        self._lock: TextIO | None = None

    def begins(self) -> bool:
        """Returns whether there is no checkpoint that the run would resume from."""
        return not self._config.resume or self._steps.newest_record() is None

    def claim(self) -> list[str]:
        """Locks the folder, on the first process; returns what has changed in the run's config.

        Writes nothing yet: other checks may still refuse the run before `write_config`.
        """
        self._lock = lock(self.path, self._note)
        newest = self._steps.newest_record() or {}
        saved = newest.get("extra", {}).get("config") or self._read_config()
        names = (weights.CONFIG, metrics.FILE, weights.CHECKPOINTS)
        if not self._config.resume and any((self.path / name).exists() for name in names):
            with self._lock:  # which moves with the run
                self._move_away()
                self._lock = lock(self.path, self._note)
            return []
        return resume_rules.changes(self._config, saved, step=newest.get("step")) if saved else []

    def write_config(self, *, end_of_text: int | None = None) -> None:
        """Writes config.json, and generation_config.json unless there is one."""
        contents = {weights.CONFIG: to_json(self._config)}
        if end_of_text is not None and not (self.path / GENERATION).exists():
            contents[GENERATION] = {"eos_token_id": end_of_text}
        for name, content in contents.items():
            with write_failures(self.path, name):
                writing.replace(self.path / name, json.dumps(content, indent=2) + "\n")

    def release(self) -> None:
        """Releases the lock, so that other runs may use the folder."""
        if self._lock is not None:
            self._lock.close()

    def _read_config(self) -> dict[str, Any]:
        """Returns the contents of config.json; nothing if there is none, or it is damaged."""
        path = self.path / weights.CONFIG
        try:
            saved = files.read_json(path) if path.is_file() else {}
        except UserError as error:
            self._note(f"{error} No checkpoint says what was run.")
            return {}
        if weights.OF_HUGGING_FACE & saved.keys() and not weights.is_run(saved):
            raise UserError(
                f"{self.path} holds a model in Hugging Face's format, not a run: choose another "
                "--out."
            )
        return saved

    def _move_away(self) -> None:
        """Moves the run that is in the folder to a free name beside it, such as run.1."""
        source = self._config.init_from
        if source is not None and Path(source).resolve().is_relative_to(self.path.resolve()):
            raise UserError(
                f"init_from={source} is in the folder {self.path}, which --resume false would move "
                "out of the way: choose another folder with --out."
            )
        folder = self.path.absolute()
        names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
        # Fails if the folder is a mount point, or the current one.
        self.path.rename(next(name for name in names if not os.path.lexists(name)))


def lock(folder: Path, note: Callable[[str], object]) -> TextIO:
    """Locks a folder until the returned file is closed, or its process ends, however it ends.

    Makes the folder if there is none, and calls `note` if its file system has no locks. Raises
    UserError if another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A link is not followed: the file is overwritten.
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    file = os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = printable(" ".join(file.read(200).split())) or "another process"
        file.close()
        raise UserError(
            f"{folder} is in use by {holder}. Wait until that run has ended or stop it, or choose "
            "another folder with --out."
        ) from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        note(f"The file system of {folder} has no locks: let only one run use the folder.")
    with write_failures(folder, "The lock file"):
        file.truncate(0)
        now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, which began at {now}\n")
        file.flush()
    return file
