"""Token files: arrays of uint16 or uint32 on disk, of which only what is read is in memory.

    .npy                 NumPy's format, of one axis: what `coat tokenize` writes
    .npy without header  raw, as OLMo's data
    .bin                 raw, as nanoGPT's data
    .bin with header     1024 bytes with the dtype and the number of tokens, as llm.c's data

Raw files do not contain their dtype: the config must give it. Beside its files, `coat tokenize`
writes a `tokens.json` with their dtype and their vocabulary.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt

from coat_jax import manifest
from coat_jax.errors import UserError
from coat_jax.files import read_json
from coat_jax.validation import Count, CountOrZero, require

SIDECAR = "tokens.json"
NOTED = {"vocab": Count, "end_of_text": CountOrZero, "tokenizer": str}
NUMPY_MAGIC = b"\x93NUMPY"
LLM_C_MAGIC: dict[bytes, np.dtype] = {
    (20240520).to_bytes(4, "little"): np.dtype(np.uint16),
    (20240801).to_bytes(4, "little"): np.dtype(np.uint32),
}
LLM_C_HEADER = 1024
CHECKED = 8 << 30  # bytes of files that are compared with their manifest: a few seconds
LOOKED_AT = 4096  # tokens from which a wrong dtype is recognized


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A file, of which a slice is read each time: it is neither in memory nor held open."""

    path: Path
    dtype: np.dtype
    offset: int  # of the first token, in bytes
    length: int  # in tokens

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> UInt[np.ndarray, " N"]:
        start, stop, _ = part.indices(self.length)
        offset = self.offset + start * self.dtype.itemsize
        return np.fromfile(self.path, self.dtype, stop - start, offset=offset)


def open_files(paths: list[Path], *, dtype: str | None) -> dict[str, TokenFile]:
    """The files by name; looks at their headers and sizes, and raises unless all have one dtype.

    Args:
        paths: the files.
        dtype: of those without a header; None is uint16.
    """
    files = [_open(path, np.dtype(dtype or np.uint16)) for path in paths]
    for file in files:
        if file.dtype != files[0].dtype:
            raise UserError(
                f"{file.path} holds {file.dtype.name}, and {files[0].path} {files[0].dtype.name}. "
                "All files must hold tokens of one dtype, made with one tokenizer."
            )
    if sum(path.stat().st_size for path in paths) <= CHECKED:
        for path in paths:
            manifest.check_if_listed(path.parent, path.name)
    return {str(file.path): file for file in files}


def sidecar_of(paths: list[Path]) -> dict[str, Any] | None:
    """The content of `tokens.json` beside these files, if `coat tokenize` made them."""
    notes = {path: _notes(path) for path in sorted({path.parent / SIDECAR for path in paths})}
    first = next(iter(notes))
    for path, note in notes.items():
        if note != notes[first]:
            raise UserError(f"{path} and {first} name different tokenizers: train on files of one.")
    return notes[first]


def _notes(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    manifest.check_if_listed(path.parent, SIDECAR)
    found = read_json(path)
    return {name: require(f"{path}: {name}", found.get(name), kind) for name, kind in NOTED.items()}


def _open(path: Path, raw_dtype: np.dtype) -> TokenFile:
    """Finds the tokens by the header of a file, if it has one; otherwise by its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(12)
    if start.startswith(NUMPY_MAGIC):
        return _open_numpy(path)
    if path.suffix.lower() == ".bin" and start[:4] in LLM_C_MAGIC:
        dtype, length = LLM_C_MAGIC[start[:4]], int.from_bytes(start[8:], "little")
        if size != LLM_C_HEADER + length * dtype.itemsize:
            raise UserError(
                f"{path} has {size:,} bytes, and its header says {length:,} tokens of "
                f"{dtype.name}: it is damaged or was not copied whole."
            )
        return TokenFile(path, dtype, LLM_C_HEADER, length)
    if size % raw_dtype.itemsize:
        raise UserError(
            f"{path} has {size:,} bytes, no multiple of {raw_dtype.name}'s {raw_dtype.itemsize}: "
            "it is damaged, or holds something else."
        )
    # Where uint32 is read as uint16, every second number is small.
    tokens = np.fromfile(path, raw_dtype, LOOKED_AT)
    low, high = tokens[::2], tokens[1::2]
    if raw_dtype == np.uint16 and len(tokens) == LOOKED_AT and low.max() > 16 > high.max():
        raise UserError(
            f"{path} does not look like uint16: every second number is at most {high.max()}. Set "
            "data.dtype to uint32."
        )
    return TokenFile(path, raw_dtype, 0, size // raw_dtype.itemsize)


def _open_numpy(path: Path) -> TokenFile:
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
