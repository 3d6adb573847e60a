"""Pictures and pages: an earlier one stays until the new one is complete."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from coat_jax import writing
from coat_jax.files import path_failures
from coat_jax.writing import write_failures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: "Figure", out: Path) -> None:
    """Writes a picture in the format of its suffix."""
    content = io.BytesIO()
    figure.savefig(content, format=out.suffix.removeprefix("."))
    save(content.getvalue(), out)


def save(content: str | bytes, out: Path) -> None:
    """Writes a file that the user named.

    Raises:
        UserError: if there can be no such file, or it does not fit on the disk.
    """
    with write_failures(out.parent, out.name), path_failures(out):
        writing.replace(out, content)
