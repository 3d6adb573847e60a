"""One folder for each step, which is complete or absent.

    100.unfinished/    while it is written; what a killed run leaves behind
    100/               renamed when all of it, manifest.json last, was on the disk
    100.deleted/       while it is removed

Renaming is atomic, so a process may be killed at any moment. What it leaves behind is ignored, and
removed when the next folder is begun, not before: a process that only reads the checkpoints of a
running run must not remove what the run is writing.

Everything else in `root` is ignored: files, and names that are not a step as Python writes it
(007). A link to a folder is a step; removing it removes the link.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coat_jax import manifest
from coat_jax.errors import UserError
from coat_jax.manifest import DamagedCheckpoint, raise_damaged
from coat_jax.writing import UNFINISHED, flush

RECORD = "record.json"
DELETED = ".deleted"
STEP = re.compile("0|[1-9][0-9]*")


class StepFolders:
    """The folders in `root`, which is made when the first of them is begun."""

    def __init__(self, root: Path):
        try:
            str(root.absolute()).encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{root.absolute()} has a name that is not UTF-8, and checkpoints need one that "
                "is: choose another folder, or rename this one."
            ) from None
        if os.path.lexists(root) and not root.is_dir():  # a run must not begin anew for that
            raise UserError(
                f"{root} is a file, or links to what is not there, and checkpoints need a folder. "
                "Is a disk missing?"
            )
        self.root = root

    def steps(self) -> list[int]:
        """Returns the steps whose folders were finished, oldest first."""
        paths = self.root.iterdir() if self.root.exists() else ()
        names = [path.name for path in paths if path.is_dir()]
        return sorted(int(name) for name in names if STEP.fullmatch(name))

    def folder(self, step: int) -> Path:
        """Returns the folder of a step; raises if there is none."""
        if step not in (steps := self.steps()):
            raise UserError(
                f"There is no checkpoint of step {step} in {self.root}. It has those of {steps}."
            )
        return self.root / str(step)

    def clear(self) -> None:
        """Makes the root, or removes from it what killed processes have left behind."""
        self.root.mkdir(parents=True, exist_ok=True)
        for path in self.root.iterdir():
            if path.suffix in (UNFINISHED, DELETED) and STEP.fullmatch(path.stem):
                _delete(path)

    def temporary(self, step: int) -> Path:
        """Returns the folder in which a step is written."""
        return self.root / f"{step}{UNFINISHED}"

    def finish(self, step: int) -> None:
        """Completes a step that was written: its folder gets its name; later steps are removed."""
        manifest.write(self.temporary(step))
        for other in self.steps():
            if other > step:
                self.remove(other)
        if os.path.lexists(self.root / str(step)):
            self.remove(step)
        self.temporary(step).rename(self.root / str(step))
        flush(self.root)

    def remove(self, step: int) -> None:
        """Removes a step: its folder is renamed before its first file is deleted."""
        doomed = self.root / f"{step}{DELETED}"
        _delete(doomed)
        (self.root / str(step)).rename(doomed)
        _delete(doomed)  # if that fails, `clear` tries again

    def record(self, step: int) -> dict[str, Any]:
        """Returns a step's record.json: the step, its held-out loss and `extra`.

        Raises:
            DamagedCheckpoint: if it has changed since it was written, or is that of another step.
        """
        folder = self.folder(step)
        manifest.check(folder, only=RECORD)
        record: dict[str, Any] = json.loads((folder / RECORD).read_text("utf-8"))
        if record["step"] != step:
            raise_damaged(folder, f"{RECORD} is that of another step")
        return record

    def newest_record(self) -> dict[str, Any] | None:
        """Returns the newest intact record.json, even if the state beside it is damaged."""
        for step in reversed(self.steps()):
            with contextlib.suppress(DamagedCheckpoint):
                return self.record(step)
        return None

    def check(self, step: int) -> None:
        """Checks every byte of a step; raises DamagedCheckpoint, naming the file that changed."""
        manifest.check(self.folder(step))
        self.record(step)

    def intact(self, step: int | None, note: Callable[[str], object]) -> int:
        """Checks every byte of a step, by default of the newest one without damage; returns it.

        `note` is called with a line about each that is skipped.
        """
        if step is not None:
            self.check(step)
            return step
        wrong: list[str] = []
        for newest in reversed(self.steps()):
            try:
                self.check(newest)
            except DamagedCheckpoint as error:
                wrong.append(str(error))
            else:
                for text in wrong:
                    note(f"{text} Using step {newest} instead.")
                return newest
        if wrong:
            raise DamagedCheckpoint(" ".join(wrong) + " No checkpoint is intact.")
        raise UserError(f"There is no checkpoint in {self.root}.")


def _delete(path: Path) -> None:
    """Deletes a file, a link or a whole folder, if there is one and it can be."""
    shutil.rmtree(path, ignore_errors=True)  # follows no link
    with contextlib.suppress(OSError):
        path.unlink()
