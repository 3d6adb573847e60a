"""One folder for each step, which is there whole or not at all.

    100.unfinished/    while it is written; what a killed run leaves behind
    100/               renamed when all of it, manifest.json last, was on the disk
    100.deleted/       while it is removed

Renaming is atomic, so a process may be killed at any moment. What it leaves behind counts for
nothing, and is cleared away when the next folder is begun, not before: whoever reads the
checkpoints of a run that is going on must not remove what it writes.
"""

import os
import shutil
from pathlib import Path

from coat_jax.training import manifest
from coat_jax.training.manifest import DamagedCheckpoint

UNFINISHED, DELETED = ".unfinished", ".deleted"


class StepFolders:
    """The folders in `root`, which is made when the first of them is begun."""

    def __init__(self, root: Path):
        if root.exists() and not root.is_dir():
            raise NotADirectoryError(f"{root} is a file, where checkpoints need a folder.")
        self.root = root

    def steps(self) -> list[int]:
        """The steps whose folders were finished, oldest first."""
        if not self.root.exists():
            return []
        return sorted(int(path.name) for path in self.root.iterdir() if path.name.isdecimal())

    def finished(self, step: int) -> Path:
        """The folder of a step; raises if there is none."""
        if step not in (steps := self.steps()):
            raise FileNotFoundError(
                f"There is no checkpoint of step {step} in {self.root}, but of {steps}."
            )
        return self.root / str(step)

    def unfinished(self, step: int) -> Path:
        """Where a step is written."""
        return self.root / f"{step}{UNFINISHED}"

    def clear(self) -> None:
        """Makes the root, or removes from it what killed processes have left behind."""
        self.root.mkdir(parents=True, exist_ok=True)
        for ending in (UNFINISHED, DELETED):
            for left_over in self.root.glob(f"*{ending}"):
                shutil.rmtree(left_over)

    def begin(self, step: int) -> None:
        """Makes the folder to write a step in."""
        self.unfinished(step).mkdir()

    def finish(self, step: int) -> None:
        """Makes a step count that was written; it becomes the last one."""
        manifest.write(self.unfinished(step))
        for other in self.steps():
            if other >= step:
                self.remove(other)
        self.unfinished(step).rename(self.root / str(step))
        _flush(self.root)

    def remove(self, step: int) -> None:
        """Removes a step, which stops counting before it loses its first file."""
        doomed = self.root / f"{step}{DELETED}"
        self.finished(step).rename(doomed)
        shutil.rmtree(doomed)

    def newest_whole(self) -> tuple[int, list[str]]:
        """The newest step without damage, and what to tell about those that are passed over."""
        notes = [
            f"{path} is a save that was not finished. It is ignored."
            for path in sorted(self.root.glob(f"*{UNFINISHED}"))
        ]
        damaged: list[str] = []
        for step in reversed(self.steps()):
            try:
                manifest.check(self.finished(step))
            except DamagedCheckpoint as error:
                damaged.append(str(error))
            else:
                return step, notes + [f"{text} Using step {step} instead." for text in damaged]
        if damaged:
            raise DamagedCheckpoint(" ".join(damaged) + " There is no whole one.")
        raise FileNotFoundError(f"There is no checkpoint in {self.root}.")


def _flush(folder: Path) -> None:
    """Makes renames in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
