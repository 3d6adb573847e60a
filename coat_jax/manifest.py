"""Checksums of the files in a folder (a checkpoint, a model, tokens): they reveal damage.

    manifest.json    {"state/d/4f0c..": [1460207, 2774918362], ..}

holds the size and the CRC-32 of every other file of its folder. It is written last, so a folder
without one was never finished. A damaged manifest is noticed, too, because it disagrees with a
file. CRC-32 protects from failing disks and truncated copies, not from tampering.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from coat_jax import writing
from coat_jax.errors import UserError
from coat_jax.printable import printable

NAME = "manifest.json"
CHUNK = 1 << 20


class DamagedCheckpoint(UserError):
    """Files of a checkpoint, a model or tokens are not what was written, or cannot be read."""


def write(folder: Path) -> None:
    """Records every file of a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    writing.replace(folder / NAME, json.dumps(_contents(folder, names), indent=1))


def check(folder: Path, only: str | None = None) -> None:
    """Raises DamagedCheckpoint unless a folder has the contents that `write` recorded.

    Args:
        folder: may have been moved since.
        only: look at this file or folder alone.
    """
    try:
        files = _read(folder, only)
        if not files and only is not None:
            raise_damaged(folder, f"{NAME} lacks {only}")
        for name in files:
            if not (folder / name).is_file():  # or is a device: reading one may never end
                raise_damaged(folder, f"{name} is missing")
        for name, (size, checksum) in _contents(folder, files).items():
            if size != files[name][0]:
                raise_damaged(folder, f"{name} has {size} bytes instead of {files[name][0]}")
            if checksum != files[name][1]:
                raise_damaged(folder, f"the checksum of {name} is wrong")
    except OSError as error:  # a failing disk, a missing permission, a folder instead of a file
        name = Path(os.fsdecode(error.filename or folder)).name
        raise_damaged(folder, f"{name} cannot be read ({error.strerror})")


def check_if_listed(folder: Path, name: str) -> None:
    """Checks a file or folder that a manifest records; folders of other programs have none."""
    listed = False
    with contextlib.suppress(DamagedCheckpoint, OSError):
        listed = bool(_read(folder, name))
    try:
        if listed:
            check(folder, name)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(
            f"{error} Make or copy it again; if you changed {name} on purpose, delete {NAME}, "
            "which has the checksums."
        ) from None


def raise_damaged(folder: Path, how: str) -> NoReturn:
    """Raises DamagedCheckpoint."""
    raise DamagedCheckpoint(f"{folder} is damaged: {printable(how)}.")


def _contents(folder: Path, names: Collection[str]) -> dict[str, tuple[int, int]]:
    """Returns the size and the checksum of each file."""

    def content(name: str) -> tuple[int, int]:
        size = checksum = 0
        with (folder / name).open("rb") as file:
            while chunk := file.read(CHUNK):
                size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        return size, checksum

    with ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(content, names), strict=True))


def _read(folder: Path, only: str | None) -> dict[str, tuple[int, int]]:
    """Returns the size and checksum of each file, or of this file or those in this folder."""
    if not (folder / NAME).is_file():  # or is a device: reading one may never end
        raise_damaged(folder, f"{NAME} is missing")
    try:
        recorded = json.loads((folder / NAME).read_text("utf-8"))
        files = {name: (int(size), int(checksum)) for name, (size, checksum) in recorded.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise_damaged(folder, f"{NAME} is not readable")
    return {n: of for n, of in files.items() if only in (None, n) or n.startswith(f"{only}/")}
