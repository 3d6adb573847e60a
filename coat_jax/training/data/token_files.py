"""Token files, mapped into memory, and the notes that `coat tokenize` writes beside them.

    .npy                 NumPy's format, of one axis: what `coat tokenize` writes
    .npy without header  raw, as OLMo's data
    .bin                 raw, as nanoGPT's data

Tokens are uint16 or uint32; raw files do not contain their dtype, so the config must give it. Of a
file only what is read is in memory.
"""

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
CHECKED = 8 << 30  # bytes of files that are compared with their manifest: a few seconds
LOOKED_AT = 4096  # tokens from which a wrong dtype is recognized


def open_files(paths: list[Path], *, dtype: str | None) -> dict[str, UInt[np.ndarray, " _"]]:
    """Looks at the headers and sizes of token files; maps them, and returns them by their names.

    Args:
        paths: the files.
        dtype: of those without a header; None is uint16.
    """
    files = {str(path): _open(path, np.dtype(dtype or np.uint16)) for path in paths}
    if sum(path.stat().st_size for path in paths) <= CHECKED:
        for path in paths:
            manifest.check_if_listed(path.parent, path.name)
    return files


def read_notes(paths: list[Path]) -> dict[str, Any]:
    """Returns the `tokens.json` that `coat tokenize` wrote beside these files; empty if none is."""
    notes = []
    for path in sorted({path.parent / SIDECAR for path in paths}):
        manifest.check_if_listed(path.parent, SIDECAR)
        found = read_json(path) if path.exists() else {}
        required = NOTED if path.exists() else {}
        notes.append({n: require(f"{path}: {n}", found.get(n), of) for n, of in required.items()})
        if notes[-1] != notes[0]:
            raise UserError(f"{path} and others name different tokenizers: train on files of one.")
    return notes[0]


def _open(path: Path, raw_dtype: np.dtype) -> np.ndarray:
    """Finds the tokens by NumPy's header, if the file has one; otherwise by its size."""
    with path.open("rb") as file:
        has_header = file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC
    if has_header:
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except Exception as error:  # NumPy parses the header as Python, which fails in many ways
            raise UserError(
                f"{path} is not a complete .npy file of tokens: {error!r}. It is damaged or was "
                "not copied whole."
            ) from None
        if array.ndim != 1 or array.dtype not in (np.uint16, np.uint32):
            raise UserError(
                f"{path} holds {array.dtype.name}{list(array.shape)}. Tokens are an array of one "
                "axis, uint16 or uint32 of this machine's byte order."
            )
        return array.view(np.ndarray)
    size, name = path.stat().st_size, raw_dtype.name
    if not size or size % raw_dtype.itemsize:
        raise UserError(
            f"{path} has {size:,} bytes, not {name} tokens: it is damaged, or holds something else."
        )
    # Where uint32 is read as uint16, every second number is small. No vocabulary would refuse it.
    tokens = np.memmap(path, raw_dtype, mode="r").view(np.ndarray)
    low, high = tokens[:LOOKED_AT:2], tokens[1:LOOKED_AT:2]
    if name == "uint16" and len(tokens) >= LOOKED_AT and low.max() > 16 > high.max():
        raise UserError(
            f"{path} does not look like uint16: every second number is at most {high.max()}. Set "
            "data.dtype to uint32."
        )
    return tokens
