"""The tensors of a Hugging Face folder, read and written in parts.

    model.safetensors                             all of them, or
    model.safetensors.index.json                  which tensor is in which file
    model-00001-of-00003.safetensors, ..

"model" is the stem of these names; diffusers has another one.

Each read maps the file into memory, copies a part of a tensor, and closes the file. Files are
created with room for all tensors, which are then filled in, in any order: a file is a length, a
header in JSON, and the tensors one after another. Pickled checkpoints (.bin, .pt) are not read:
unpickling runs whatever code they contain.
"""

import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from coat_jax import manifest
from coat_jax.errors import UserError
from coat_jax.files import MissingFile, read_failures, read_json, require_regular
from coat_jax.models.hf.names import file_order
from coat_jax.models.lazy_arrays import Index, LazyArray, in_dtype, piece_of
from coat_jax.writing import require_space

CONFIG = "config.json"
STEM, WHOLE, INDEX = "model", "{}.safetensors", "{}.safetensors.index.json"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
CODES = {"I8": "int8", "F8_E4M3": "float8_e4m3fn", "I32": "int32", "I64": "int64"}
Spec = tuple[tuple[int, ...], np.dtype]  # of a tensor: its shape and dtype


def read_config_json(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; raises if it is not the one that coat_jax wrote there."""
    manifest.check_if_listed(folder, CONFIG)
    return read_json(folder / CONFIG)


def read_tensors(
    folder: Path, kinds: Mapping[str, str] = FLOATS, stem: str = STEM
) -> dict[str, LazyArray]:
    """The tensors of a folder by name, to be read in parts.

    The first read from a file checks it, where there is a manifest.

    Args:
        folder: with safetensors files.
        kinds: the dtypes that are read, by their names in the files, with NumPy's names: FLOATS,
            with or without CODES.
        stem: of the files' names.
    """
    header_of = functools.cache(lambda file: _header(folder / file))
    check = functools.cache(functools.partial(manifest.check_if_listed, folder))
    found = {}
    for name, file in _index(folder, stem).items():
        if name.endswith(("rotary_emb.inv_freq", "embeddings.position_ids")):
            continue  # in old checkpoints; the Config says what they are
        if name not in header_of(file):
            raise UserError(
                f"{INDEX.format(stem)} says that {name} is in {file}, which has no such tensor."
            )
        kind, shape, offset = header_of(file)[name]
        if kind not in kinds:
            raise UserError(
                f"{name} in {folder} is stored as {kind}, and coat_jax reads {', '.join(kinds)}. "
                "Load the model with transformers, dequantized, and save it."
            )
        found[name] = _lazy(check, folder / file, jnp.dtype(kinds[kind]), shape, offset)
    return found


def read_file(path: Path) -> dict[str, LazyArray]:
    """The tensors of one file by name, those of floats, to be read in parts."""
    return {
        name: _lazy(lambda file: None, path, jnp.dtype(FLOATS[kind]), shape, offset)
        for name, (kind, shape, offset) in _header(path).items()
        if kind in FLOATS
    }


def _lazy(
    check: Callable[[str], None], path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int
) -> LazyArray:
    read = functools.partial(_read, check, (path, dtype, "r", offset, shape))
    return LazyArray(shape, dtype, piece_of(shape, dtype.itemsize, stacked=False), read)


def _read(check: Callable[[str], None], place: tuple[Any, ...], index: Index) -> np.ndarray:
    check(place[0].name)
    # safetensors' own reader supports only NumPy's own dtypes, which have no FP8.
    with read_failures(place[0]):
        return np.array(np.memmap(*place)[index])


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """The dtype, the shape and the place of each tensor in a file."""
    require_regular(path)
    try:
        with safe_open(path, framework="numpy"):  # checks the header
            pass
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or truncated: {error}. Copy it here again.") from None
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        name: (entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _index(folder: Path, stem: str) -> dict[str, str]:
    """The file of each tensor."""
    index, single = INDEX.format(stem), WHOLE.format(stem)
    if not folder.is_dir():
        raise MissingFile(
            f"There is no folder {folder}. Download the model first: hf download <name> "
            f"--local-dir {folder}"
        )
    if os.path.lexists(folder / index):
        file_of: dict[str, str] = read_json(folder / index).get("weight_map", {})
        if not isinstance(file_of, dict) or not file_of:
            raise UserError(f"{index} in {folder} has no weight_map: it is no index of tensors.")
        for file in file_of.values():
            is_name = isinstance(file, str) and Path(file).name == file
            if not is_name or not (folder / file).is_file():
                raise MissingFile(f"{index} names the file {file!r}, not in {folder}.")
        return file_of
    if os.path.lexists(folder / single):
        return dict.fromkeys(_header(folder / single), single)
    there = sorted(path.name for path in folder.iterdir())[:8]
    raise MissingFile(
        f"There is no {single} and no {index} in {folder}, but {there}. Other formats are not "
        "read: load the model with transformers and save_pretrained it."
    )


class NewTensors:
    """Tensors that are being written: there is room for all, and parts of them are filled in."""

    def __init__(
        self, folder: Path, tensors: Mapping[str, Spec], file_bytes: int, stem: str = STEM
    ):
        """Makes the files.

        Args:
            folder: without a model or a run in it; made if it is not there.
            tensors: shape and dtype of each, by name.
            file_bytes: how large a file may become; a larger tensor has one for itself.
            stem: of the files' names.
        """
        found = sorted(path.name for path in folder.glob("*.safetensors*"))
        found += [name for name in (CONFIG, "checkpoints") if os.path.lexists(folder / name)]
        if found:
            raise UserError(f"{folder} holds a model already: {found[0]}. Name another one.")
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensors[name] for name in sorted(tensors, key=file_order)}
        self._folder, self._tensors = folder, tensors
        sizes = {n: math.prod(shape) * dtype.itemsize for n, (shape, dtype) in tensors.items()}
        groups = _distribute(sizes, file_bytes)
        require_space(folder, "The model", sum(sizes.values()))
        self._place: dict[str, tuple[Path, int]] = {}
        kinds = {ours: theirs for theirs, ours in (FLOATS | CODES).items()}
        for number, names in enumerate(groups, 1):
            many = f"{stem}-{number:05}-of-{len(groups):05}.safetensors"
            path = folder / (WHOLE.format(stem) if len(groups) == 1 else many)
            # transformers refuses a file that does not say which framework wrote it.
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            ends = [0, *itertools.accumulate(sizes[name] for name in names)]
            for name, begin, end in zip(names, ends, ends[1:], strict=False):
                shape, dtype = tensors[name]
                entry = {"dtype": kinds[dtype.name], "shape": list(shape)}
                header[name] = entry | {"data_offsets": [begin, end]}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            path.write_bytes(len(text).to_bytes(8, "little") + text)
            start = path.stat().st_size
            self._place |= {n: (path, start + at) for n, at in zip(names, ends, strict=False)}
            os.truncate(path, start + ends[-1])
        if len(groups) > 1:
            files = {name: path.name for name, (path, _) in sorted(self._place.items())}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
            (folder / INDEX.format(stem)).write_text(json.dumps(index, indent=2) + "\n", "utf-8")

    def write(self, name: str, index: tuple[slice, ...], values: np.ndarray) -> None:
        """Fills in a part of a tensor."""
        path, offset = self._place[name]
        shape, dtype = self._tensors[name]
        values = np.ascontiguousarray(in_dtype(values, dtype, name))
        first = [i.indices(n)[0] for i, n in zip(index, shape, strict=True)]
        # What is whole along all axes but the first of it is written at once.
        cut = [axis for axis, n in enumerate(shape) if values.shape[axis] != n]
        outer = cut[-1] if cut else 0
        with path.open("r+b") as file:
            for place in np.ndindex(values.shape[:outer]):
                at = 0
                for axis, n in enumerate(shape):
                    at = at * n + first[axis] + (place[axis] if axis < outer else 0)
                file.seek(offset + at * dtype.itemsize)
                file.write(values[place].view(np.uint8).data)

    def finish(self, beside: Mapping[str, Any]) -> None:
        """Writes files of JSON, by name, and the manifest of all files."""
        for name, content in beside.items():
            (self._folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        manifest.write(self._folder)


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
