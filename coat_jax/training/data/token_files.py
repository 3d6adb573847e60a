"""Token files: arrays of uint16 or uint32 on disk, of which only what is read is in memory.

    .npy                 NumPy's format, of one axis: what `coat tokenize` writes
    .npy without header  raw, as OLMo's data
    .bin                 raw, as nanoGPT's data
    .bin with header     1024 bytes with the dtype and the number of tokens, as llm.c's data

Raw files do not contain their dtype: the config must give it. Beside its files, `coat tokenize`
writes a `tokens.json` with their dtype and their vocabulary.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt

from coat_jax import manifest
from coat_jax.errors import UserError
from coat_jax.files import path_failures, read_json, status
from coat_jax.limits import Count, CountOrZero, require

SIDECAR, NOTED = "tokens.json", ("vocab", "end_of_text", "tokenizer")
NUMPY_MAGIC = b"\x93NUMPY"
LLM_C_MAGIC: dict[bytes, np.dtype] = {
    (20240520).to_bytes(4, "little"): np.dtype(np.uint16),
    (20240801).to_bytes(4, "little"): np.dtype(np.uint32),
}
LLM_C_HEADER = 1024
CHECKED = 8 << 30  # bytes of files that are compared with their manifest: a few seconds
LOOKED_AT = 4096  # tokens from which a wrong dtype is recognized
OPEN_FILES = 128  # a map holds its file open, and systems allow a process 1024 files or so


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A file of tokens, as a part of a stream.

    Attributes:
        path: of the file.
        dtype: of its tokens.
        offset: where they begin, in bytes.
        length: how many there are.
    """

    path: Path
    dtype: np.dtype
    offset: int
    length: int

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int) -> UInt[np.ndarray, " N"]:
        """The tokens from `start` to before `stop`."""
        return _mapped(self)[start:stop]


def open_files(paths: list[Path], *, dtype: str | None) -> list[TokenFile]:
    """Looks at each file's header and size; raises unless all hold tokens of one dtype.

    Args:
        paths: the files.
        dtype: of those without a header; None is uint16.
    """
    _mapped.cache_clear()  # a file of the same name may be another one by now
    files = [_opened(path, np.dtype(dtype or np.uint16)) for path in paths]
    for file in files:
        if file.dtype != files[0].dtype:
            raise UserError(
                f"{file.path} holds {file.dtype.name}, and {files[0].path} {files[0].dtype.name}. "
                "All files must hold tokens of one dtype, made with one tokenizer."
            )
    if sum(path.stat().st_size for path in paths) <= CHECKED:
        for path in paths:
            manifest.check_if_listed(path.parent, path.name)
    return files


def sidecar_of(paths: list[Path]) -> dict[str, Any] | None:
    """The content of `tokens.json` beside these files, if `coat tokenize` made them."""
    notes = {path: _notes(path) for path in sorted({path.parent / SIDECAR for path in paths})}
    first = next(iter(notes))
    for path, note in notes.items():
        for key in NOTED:
            if (note or {}).get(key) != (notes[first] or {}).get(key):
                raise UserError(
                    f"{path} and {first} name different tokenizers: train on files of one."
                )
    return notes[first]


def _notes(path: Path) -> dict[str, Any] | None:
    if not status(path):
        return None
    manifest.check_if_listed(path.parent, SIDECAR)
    notes = read_json(path)
    remedy = "Make the files again with `coat tokenize`, or remove this one and set "
    remedy += "data.end_of_text."
    if missing := [key for key in NOTED if key not in notes]:
        raise UserError(f"{path} lacks {', '.join(missing)}. {remedy}")
    require(f"{path}: vocab", notes["vocab"], Count)
    require(f"{path}: tokenizer", notes["tokenizer"], str)
    require(f"{path}: end_of_text", notes["end_of_text"], CountOrZero)
    return {key: notes[key] for key in NOTED}


def _opened(path: Path, raw_dtype: np.dtype) -> TokenFile:
    """A file whose header, if it has one, gives the number of tokens and their dtype."""
    size = path.stat().st_size
    with path_failures(path), path.open("rb") as file:
        start = file.read(12)
    if start.startswith(NUMPY_MAGIC):
        found = _numpy_file(path)
    elif path.suffix.lower() == ".bin" and start[:4] in LLM_C_MAGIC:
        length = int.from_bytes(start[8:], "little")
        found = TokenFile(path, LLM_C_MAGIC[start[:4]], LLM_C_HEADER, length)
        if size != LLM_C_HEADER + found.length * found.dtype.itemsize:
            raise UserError(
                f"{path} has {size:,} bytes, and its header says {found.length:,} tokens of "
                f"{found.dtype.name}: it is damaged or was not copied whole."
            )
    else:
        if size % raw_dtype.itemsize:
            raise UserError(
                f"{path} has {size:,} bytes, no multiple of {raw_dtype.name}'s "
                f"{raw_dtype.itemsize}: it is damaged, or holds something else."
            )
        _require_dtype(path, raw_dtype)
        found = TokenFile(path, raw_dtype, 0, size // raw_dtype.itemsize)
    if not len(found):
        raise UserError(f"{path} holds no tokens.")
    return found


def _require_dtype(path: Path, dtype: np.dtype) -> None:
    """Raises where uint32 would be read as uint16: then every second number is small."""
    tokens = np.fromfile(path, dtype, LOOKED_AT)
    low, high = tokens[::2], tokens[1::2]
    if dtype == np.uint16 and len(tokens) == LOOKED_AT and low.max() > 16 > high.max():
        raise UserError(
            f"{path} does not look like uint16: every second number is at most {high.max()}. Set "
            "data.dtype to uint32."
        )


def _numpy_file(path: Path) -> TokenFile:
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # NumPy parses the header as Python, which fails in many ways
        raise UserError(
            f"{path} is not a complete .npy file of tokens: {error!r}. It is damaged or was not "
            "copied whole."
        ) from None
    if array.ndim != 1 or array.dtype not in (np.uint16, np.uint32):
        raise UserError(
            f"{path} holds {array.dtype.name}{list(array.shape)}. Tokens are an array of one axis, "
            "uint16 or uint32 of this machine's byte order."
        )
    return TokenFile(path, array.dtype, array.offset, len(array))


@functools.lru_cache(OPEN_FILES)
def _mapped(file: TokenFile) -> UInt[np.ndarray, " N"]:
    return np.memmap(file.path, file.dtype, "r", file.offset, (file.length,))
