"""The tensors of a Hugging Face folder, read and written one file at a time.

    model.safetensors                             all of them, or
    model.safetensors.index.json                  which tensor is in which file
    model-00001-of-00003.safetensors, ..

Files are mapped into memory and read in slices, so a device that holds a part of a tensor reads
that part only. Pickled checkpoints (.bin, .pt) are not read: unpickling runs whatever they hold.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Tensors:
    """The tensors of a folder by name, as lazy slices."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[str, tuple[Any, set[str]]] = {}
        self._file_of = _index(folder)

    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of a tensor, as NumPy calls it; raises unless it is a float of 16 bits up."""
        dtype = self._slice(name).get_dtype()
        if dtype not in FLOATS:
            raise ValueError(
                f"{name} in {self.folder} is stored as {dtype}, and coat_jax reads "
                f"{', '.join(FLOATS)}. Load the model with transformers, dequantized, and save it."
            )
        return FLOATS[dtype]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor."""
        self.dtype(name)
        return self._slice(name)[index]

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open:
            handle = safe_open(self.folder / file, framework="numpy")
            self._open[file] = handle, set(handle.keys())
        handle, names = self._open[file]
        if name not in names:
            raise ValueError(f"{INDEX} says that {name} is in {file}, which has no such tensor.")
        return handle.get_slice(name)


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {folder}. Download the model first: hf download <name> "
            f"--local-dir {folder}"
        )
    if (folder / INDEX).exists():
        file_of: dict[str, str] = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        for file in sorted(set(file_of.values())):
            if Path(file).name != file or not (folder / file).exists():
                raise FileNotFoundError(f"{INDEX} names the file {file!r}, not in {folder}.")
        return file_of
    if (folder / WHOLE).exists():
        with safe_open(folder / WHOLE, framework="numpy") as handle:
            return dict.fromkeys(handle.keys(), WHOLE)
    there = sorted(path.name for path in folder.iterdir())[:8]
    raise FileNotFoundError(
        f"There is no {WHOLE} and no {INDEX} in {folder}, but {there}. Other formats are not "
        "read: load the model with transformers and save_pretrained it."
    )


class Entry(NamedTuple):
    """A tensor that will be written: `value` fetches it when its file's turn comes."""

    name: str
    shape: tuple[int, ...]
    value: Callable[[], np.ndarray]


def write(folder: Path, entries: Sequence[Entry], dtype: np.dtype, file_bytes: int) -> None:
    """Writes all entries as `dtype`, in files of up to `file_bytes`, one file in memory."""
    if found := sorted(path.name for path in folder.glob("*.safetensors*")):
        raise FileExistsError(f"{folder} holds a model already: {found[0]}. Name another folder.")
    files = _distribute(entries, dtype.itemsize, file_bytes)
    file_of: dict[str, str] = {}
    for number, group in enumerate(files, 1):
        name = WHOLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {e.name: np.ascontiguousarray(e.value(), dtype=dtype) for e in group}
        # transformers refuses a file that does not say which framework wrote it.
        save_file(tensors, folder / name, metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        total = sum(_size(e) for e in entries) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _distribute(entries: Iterable[Entry], itemsize: int, file_bytes: int) -> list[list[Entry]]:
    """The entries in order, in groups of up to `file_bytes`; a larger one stands alone."""
    files: list[list[Entry]] = []
    room = 0
    for entry in entries:
        size = _size(entry) * itemsize
        if not files or size > room:
            files.append([])
            room = file_bytes
        files[-1].append(entry)
        room -= size
    return files


def _size(entry: Entry) -> int:
    return int(np.prod(entry.shape, dtype=np.int64))
