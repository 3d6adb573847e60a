"""One folder for each step, which is complete or absent.

    100.unfinished/    while it is written; what a killed run leaves behind
    100/               renamed when all of it, manifest.json last, was on the disk
    100.deleted/       while it is removed

Renaming is atomic, so a process may be killed at any moment. What it leaves behind is ignored, and
removed when the next folder is begun, not before: a process that only reads the checkpoints of a
running run must not remove what the run is writing.

Everything else in `root` is ignored: files, empty folders, and names that are not a step as Python
writes it (007). A link to a folder is a step; removing it removes the link.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from coat_jax import manifest
from coat_jax.errors import UserError
from coat_jax.files import require_utf8
from coat_jax.manifest import DamagedCheckpoint, damaged
from coat_jax.writing import UNFINISHED, flush

RECORD = "record.json"
DELETED = ".deleted"


class StepFolders:
    """The folders in `root`, which is made when the first of them is begun."""

    def __init__(self, root: Path):
        require_utf8(root.absolute(), "checkpoints")
        if root.is_symlink() and not root.exists():  # a run must not begin anew for that
            raise UserError(f"{root} links to what is not there. Is a disk missing?")
        if root.exists() and not root.is_dir():
            raise UserError(f"{root} is a file, where checkpoints need a folder.")
        self.root = root

    def steps(self) -> list[int]:
        """The steps whose folders were finished, oldest first."""
        if not self.root.exists():
            return []
        return sorted(
            int(path.name)
            for path in self.root.iterdir()
            if _is_step(path.name) and _holds_something(path)
        )

    def finished(self, step: int) -> Path:
        """The folder of a step; raises if there is none."""
        if step not in (steps := self.steps()):
            raise UserError(
                f"There is no checkpoint of step {step} in {self.root}. It has those of {steps}."
            )
        return self.root / str(step)

    def unfinished(self, step: int) -> Path:
        """Where a step is written."""
        return self.root / f"{step}{UNFINISHED}"

    def clear(self) -> list[Path]:
        """Makes the root, or removes from it what killed processes have left behind.

        Returns:
            What could not be removed.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        left_over = [
            path
            for path in self.root.iterdir()
            if path.suffix in (UNFINISHED, DELETED) and _is_step(path.stem)
        ]
        return [path for path in left_over if not _delete(path)]

    def begin(self, step: int) -> None:
        """Makes the folder to write a step in."""
        self.unfinished(step).mkdir()

    def finish(self, step: int) -> None:
        """Completes a step that was written: its folder gets its name."""
        manifest.write(self.unfinished(step))
        for other in self.steps():
            if other >= step:
                self.remove(other)
        place = self.root / str(step)
        if os.path.lexists(place):  # something else has its name
            self.remove(step)
        self.unfinished(step).rename(place)
        flush(self.root)

    def remove(self, step: int) -> None:
        """Removes a step: its folder is renamed before its first file is deleted."""
        doomed = self.root / f"{step}{DELETED}"
        _delete(doomed)
        (self.root / str(step)).rename(doomed)
        _delete(doomed)  # if not, `clear` tries again

    def check(self, step: int) -> Path:
        """The folder of a step, after every byte of it has been checked.

        Raises:
            DamagedCheckpoint: naming the file that has changed.
        """
        folder = self.finished(step)
        manifest.check(folder)
        self.record(step)
        return folder

    def record(self, step: int) -> dict[str, Any]:
        """A step's record.json: the step, its held-out loss and what was saved beside the state.

        Raises:
            DamagedCheckpoint: if it has changed since it was written, or is that of another step.
        """
        folder = self.finished(step)
        manifest.check(folder, only=RECORD)
        try:
            record = json.loads((folder / RECORD).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            damaged(folder, f"{RECORD} is not readable")
        if not isinstance(record, dict) or not isinstance(record.get("extra"), dict):
            damaged(folder, f"{RECORD} is not a record")
        if record.get("step") != step:
            damaged(folder, f"{RECORD} is that of another step")
        return record

    def newest_record(self) -> dict[str, Any] | None:
        """The newest intact record.json, even if the state beside it is damaged."""
        for step in reversed(self.steps()):
            with contextlib.suppress(DamagedCheckpoint):
                return self.record(step)
        return None

    def newest_whole(self) -> tuple[int, list[str]]:
        """The newest step without damage, and a line about each newer one, which is skipped."""
        notes = [
            f"{path} is a save that was not finished. It is ignored."
            for path in sorted(self.root.glob(f"*{UNFINISHED}"))
            if _is_step(path.stem)
        ]
        wrong: list[str] = []
        for step in reversed(self.steps()):
            try:
                self.check(step)
            except DamagedCheckpoint as error:
                wrong.append(str(error))
            else:
                return step, notes + [f"{text} Using step {step} instead." for text in wrong]
        if wrong:
            raise DamagedCheckpoint(" ".join(wrong) + " No checkpoint is intact.")
        raise UserError(f"There is no checkpoint in {self.root}.")


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def _holds_something(folder: Path) -> bool:
    try:
        return folder.is_dir() and any(folder.iterdir())
    except FileNotFoundError:  # removed by the run while this process looks
        return False
    except OSError:  # it may hold something: checking it reports what is wrong
        return True


def _delete(path: Path) -> bool:
    """Deletes a file, a link or a whole folder, if there is one; returns whether it is gone."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path)
    except OSError:
        return False
    return True
