"""The tensors of a Hugging Face folder, read and written in parts.

    model.safetensors                             all of them, or
    model.safetensors.index.json                  which tensor is in which file
    model-00001-of-00003.safetensors, ..

Each read maps the file into memory, copies a part of a tensor, and closes the file. Files are
created with room for all tensors, which are then filled in, in any order: a file is a length, a
header in JSON, and the tensors one after another. Pickled checkpoints (.bin, .pt) are not read:
unpickling runs whatever code they contain.
"""

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from coat_jax import manifest
from coat_jax.errors import UserError
from coat_jax.files import MissingFile, read_json, require_regular
from coat_jax.models.lazy_arrays import in_dtype
from coat_jax.writing import require_space

CONFIG = "config.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FP8 = "F8_E4M3"
CODES = {"I8": "int8", FP8: "float8_e4m3fn", "I32": "int32", "I64": "int64"}
Spec = tuple[tuple[int, ...], np.dtype]  # of a tensor: its shape and dtype


def read_config_json(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; raises if it is not the one that coat_jax wrote there."""
    manifest.check_if_listed(folder, CONFIG)
    return read_json(folder / CONFIG)


class Tensors:
    """The tensors of a folder by name."""

    def __init__(self, folder: Path, kinds: Mapping[str, str] = FLOATS):
        """Opens no file yet.

        Args:
            folder: with safetensors files.
            kinds: the dtypes that are read, by their names in the files, with NumPy's names:
                FLOATS, with or without CODES.
        """
        self.folder = folder
        self._file_of, self._kinds = _index(folder), kinds
        self._check = functools.cache(functools.partial(manifest.check_if_listed, folder))

    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._file_of)

    def spec(self, name: str) -> Spec:
        """The shape and the dtype of a tensor; raises unless the dtype is one that is read."""
        with self._slice(name) as tensor:
            return tuple(tensor.get_shape()), jnp.dtype(self._dtype_of(name, tensor))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor. The first read from a file checks it, where there is a manifest."""
        self._check(self._file_of[name])
        with self._slice(name) as tensor:
            if self._dtype_of(name, tensor) != CODES[FP8]:
                return tensor[index]
        # safetensors supports only NumPy's own dtypes, which have no FP8.
        return np.array(_map(self.folder / self._file_of[name], name)[index])

    @contextlib.contextmanager
    def _slice(self, name: str) -> Iterator[Any]:
        """A tensor, to be read while its file is open."""
        file = self._file_of[name]
        with _open(self.folder / file) as handle:
            if name not in handle.keys():  # noqa: SIM118 (it is no mapping)
                raise UserError(f"{INDEX} says that {name} is in {file}, which has no such tensor.")
            yield handle.get_slice(name)

    def _dtype_of(self, name: str, tensor: Any) -> str:
        dtype = tensor.get_dtype()
        if dtype not in self._kinds:
            raise UserError(
                f"{name} in {self.folder} is stored as {dtype}, and coat_jax reads "
                f"{', '.join(self._kinds)}. Load the model with transformers, dequantized, and "
                "save it."
            )
        return self._kinds[dtype]


def _open(path: Path) -> Any:
    require_regular(path)
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or truncated: {error}. Copy it here again.") from None


def _map(path: Path, name: str) -> np.ndarray:
    """A tensor in FP8, mapped into memory. The file has been opened, so its header is sound."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[name]
    offset, shape = 8 + size + entry["data_offsets"][0], tuple(entry["shape"])
    return np.memmap(path, jnp.float8_e4m3fn, mode="r", offset=offset, shape=shape)


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    if not folder.is_dir():
        raise MissingFile(
            f"There is no folder {folder}. Download the model first: hf download <name> "
            f"--local-dir {folder}"
        )
    if os.path.lexists(folder / INDEX):
        file_of: dict[str, str] = read_json(folder / INDEX).get("weight_map", {})
        if not isinstance(file_of, dict) or not file_of:
            raise UserError(
                f"{INDEX} in {folder} has no weight_map: it is not an index of tensors."
            )
        for file in file_of.values():
            is_name = isinstance(file, str) and Path(file).name == file
            if not is_name or not (folder / file).is_file():
                raise MissingFile(f"{INDEX} names the file {file!r}, not in {folder}.")
        return file_of
    if os.path.lexists(folder / WHOLE):
        with _open(folder / WHOLE) as handle:
            return dict.fromkeys(handle.keys(), WHOLE)
    there = sorted(path.name for path in folder.iterdir())[:8]
    raise MissingFile(
        f"There is no {WHOLE} and no {INDEX} in {folder}, but {there}. Other formats are not "
        "read: load the model with transformers and save_pretrained it."
    )


class NewTensors:
    """Tensors that are being written: there is room for all, and parts of them are filled in."""

    def __init__(self, folder: Path, tensors: Mapping[str, Spec], file_bytes: int):
        """Makes the files.

        Args:
            folder: without a model or a run in it.
            tensors: shape and dtype of each, by name, in the order of the files.
            file_bytes: how large a file may become; a larger tensor has one for itself.
        """
        _require_no_model(folder)
        self._folder, self._tensors = folder, dict(tensors)
        sizes = {name: _size(*spec) for name, spec in tensors.items()}
        groups = _distribute(sizes, file_bytes)
        require_space(folder, "The model", sum(sizes.values()))
        self._place: dict[str, tuple[Path, int]] = {}
        for number, names in enumerate(groups, 1):
            many = f"model-{number:05}-of-{len(groups):05}.safetensors"
            path = folder / (WHOLE if len(groups) == 1 else many)
            header = self._header(names, sizes)
            path.write_bytes(header)
            offset = len(header)
            for name in names:
                self._place[name] = path, offset
                offset += sizes[name]
            os.truncate(path, offset)
        if len(groups) > 1:
            files = {name: path.name for name, (path, _) in sorted(self._place.items())}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")

    def _header(self, names: Sequence[str], sizes: Mapping[str, int]) -> bytes:
        # transformers refuses a file that does not say which framework wrote it.
        content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        kinds = {ours: theirs for theirs, ours in (FLOATS | CODES).items()}
        end = 0
        for name in names:
            begin, end = end, end + sizes[name]
            shape, dtype = self._tensors[name]
            kind, offsets = kinds[dtype.name], [begin, end]
            content[name] = {"dtype": kind, "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def write(self, name: str, index: tuple[slice, ...], values: np.ndarray) -> None:
        """Fills in a part of a tensor, which has one or two axes."""
        path, offset = self._place[name]
        shape, dtype = self._tensors[name]
        size = dtype.itemsize
        values = np.ascontiguousarray(in_dtype(values, dtype, name))
        first = index[0].indices(shape[0])[0]
        columns = math.prod(shape[1:])
        with path.open("r+b") as file:
            if values.shape[1:] == shape[1:]:
                file.seek(offset + first * columns * size)
                file.write(values.view(np.uint8).data)
                return
            left = index[1].indices(columns)[0]
            for number, row in enumerate(values, first):
                file.seek(offset + (number * columns + left) * size)
                file.write(row.view(np.uint8).data)

    def finish(self, config_json: Mapping[str, Any]) -> None:
        """Writes config.json, and the manifest of all files."""
        (self._folder / CONFIG).write_text(json.dumps(config_json, indent=2) + "\n", "utf-8")
        manifest.write(self._folder)


def _require_no_model(folder: Path) -> None:
    """Raises if the folder holds a model or a run, whose config.json would be replaced."""
    found = sorted(path.name for path in folder.glob("*.safetensors*"))
    found += [name for name in ("config.json", "checkpoints") if os.path.lexists(folder / name)]
    if found:
        raise UserError(f"{folder} holds a model already: {found[0]}. Name another one.")


def _distribute(sizes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    """The names in order, in groups of up to `file_bytes`; a larger one stands alone."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= size
    return groups


def _size(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
