"""A folder that appears when it is complete; until then it has another name.

Whoever is killed leaves the other name behind. It is not cleared away: another process may be
writing there.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from coat_jax.errors import UserError


class NewFolder(NamedTuple):
    """Where a folder is to be made.

    Attributes:
        out: its name.
        suffix: of its name until it is complete.
        command: which makes it, for the error.
    """

    out: Path
    suffix: str
    command: str

    @property
    def unfinished(self) -> Path:
        """Its name until it is complete."""
        return self.out.with_name(self.out.name + self.suffix)

    def require_new(self) -> None:
        """Raises if there is something already."""
        if self.out.exists():
            raise UserError(f"{self.out} exists already: name another folder, or remove it.")
        if self.unfinished.exists():
            raise UserError(
                f"{self.unfinished} exists: another `{self.command}` is writing it, or was killed. "
                "Remove it if none is running."
            )

    @contextlib.contextmanager
    def appearing(self) -> Iterator[Path]:
        """The folder to write in; it gets its name if all goes well, and goes away if not."""
        self.unfinished.mkdir(parents=True)
        try:
            yield self.unfinished
            self.unfinished.rename(self.out)
        except BaseException:
            shutil.rmtree(self.unfinished, ignore_errors=True)
            raise
