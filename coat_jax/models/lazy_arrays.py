"""Parameters in files or on devices, which are read in parts: host memory never holds all of them.

    load      loads a model onto a mesh, each device its own part
    pieces    divides a parameter into small pieces: to convert it, only one is in memory at a time

A parameter is named by its path in the model's state, as in ("layers", "mlp", "gate").
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from coat_jax.errors import UserError
from coat_jax.models.config import Config
from coat_jax.models.creation import abstract
from coat_jax.models.llama import Llama
from coat_jax.nn import MeshAxes
from coat_jax.printable import amount

PIECE = 64 << 20  # bytes, about

Name = tuple[str | int, ...]
Index = tuple[slice, ...]


class LazyArray(NamedTuple):
    """A parameter in a file or on devices.

    Attributes:
        shape: of the whole parameter.
        dtype: in which it is stored.
        piece: the shape of parts that are small enough to be read at once.
        read: a function from an index to that part.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    piece: tuple[int, ...]
    read: Callable[[Index], np.ndarray]

    def whole(self) -> np.ndarray:
        """All of it."""
        return self.read((slice(None),) * len(self.shape))


Parameters = Mapping[Name, LazyArray]


def load(
    config: Any,
    parameters: Parameters,
    *,
    mesh: Mesh | None = None,
    module: Callable[..., Any] = Llama,
) -> Any:
    """The model with these parameters, cast to its dtype.

    Args:
        config: the model whose parameters these are.
        parameters: are read one after another. They may be stacked by layer even if the model is
            not, and vice versa.
        mesh: by default the one that is set, if any.
        module: the class of the model.
    """
    _require_layers(config, parameters)
    parameters = arranged(parameters, scan=config.scan)
    graph, state = abstract(config, mesh=mesh, module=module)
    return fill(graph, state, parameters)


def fill(graph: Any, state: Any, parameters: Parameters) -> Llama:
    """The model of a graph and a state of shapes, dtypes and shardings, filled with values."""
    flat = dict(nnx.to_flat_state(state))
    _require({path: leaf.shape for path, leaf in flat.items()}, parameters)
    for path, leaf in flat.items():
        flat[path] = leaf.replace(_placed(parameters[path], leaf))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def arranged(parameters: Parameters, *, scan: bool) -> Parameters:
    """The same parameters, with those of all layers stacked (`scan`) or one by one."""
    layers = {name: one for name, one in parameters.items() if name[0] == "layers"}
    numbered = any(isinstance(name[1], int) for name in layers)
    if numbered != scan:
        return parameters
    outside: dict[Name, LazyArray] = {n: one for n, one in parameters.items() if n not in layers}
    if not scan:
        unstacked = {
            ("layers", i, *name[1:]): _one_of(one, i)
            for name, one in layers.items()
            for i in range(one.shape[0])
        }
        return outside | unstacked
    together: dict[Name, list[LazyArray]] = {}
    # A checkpoint may list layer 10 before layer 2.
    for name, one in sorted(layers.items(), key=lambda item: item[0][1]):
        together.setdefault(("layers", *name[2:]), []).append(one)
    return outside | {name: _stack_of(ones) for name, ones in together.items()}


def _one_of(one: LazyArray, layer: int) -> LazyArray:
    def read(index: Index) -> np.ndarray:
        part: np.ndarray = one.read((slice(layer, layer + 1), *index))[0]
        return part

    return LazyArray(one.shape[1:], one.dtype, one.piece[1:], read)


def _stack_of(ones: Sequence[LazyArray]) -> LazyArray:
    """The parameters of layers in order, with a first axis over layers."""
    first = ones[0]

    def read(index: Index) -> np.ndarray:
        return np.stack([one.read(index[1:]) for one in ones[index[0]]])

    return LazyArray((len(ones), *first.shape), first.dtype, (1, *first.piece), read)


def _placed(array: LazyArray, leaf: Any) -> jax.Array:
    def part(index: Index | None) -> np.ndarray:
        whole = (slice(None),) * len(leaf.shape)
        return cast(array, leaf.dtype).read(whole if index is None else index)

    if leaf.sharding is None:
        return jax.device_put(part(None))
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def require_same(config: Config, parameters: Parameters) -> None:
    """Raises unless these are the parameters of the model."""
    _require_layers(config, parameters)
    _, state = abstract(dataclasses.replace(config, axes=MeshAxes()))
    _require({path: leaf.shape for path, leaf in nnx.to_flat_state(state)}, parameters)


def _require_layers(config: Config, parameters: Parameters) -> None:
    """Raises for a wrong number of layers, before thousands of them are built one by one."""
    if config.scan:
        return
    layers = {name: one for name, one in parameters.items() if name[0] == "layers"}
    numbers = {name[1] for name in layers if isinstance(name[1], int)}
    there = len(numbers) or max((one.shape[0] for one in layers.values()), default=0)
    if there != config.layers:
        raise UserError(
            f"This model does not match its config: it has {amount(there, 'layer')}, and "
            f"layers={config.layers:,}."
        )


def _require(needed: Mapping[Name, tuple[int, ...]], parameters: Parameters) -> None:
    other = {path for path in needed.keys() & parameters if needed[path] != parameters[path].shape}
    for kind, paths in (
        ("lacks", needed.keys() - parameters.keys()),
        ("also has", parameters.keys() - needed.keys()),
        ("has in another shape", other),
    ):
        if paths:
            names = ", ".join(sorted(".".join(map(str, path)) for path in paths)[:5])
            raise UserError(f"This model does not match its config: it {kind} {names}.")


def pieces(array: LazyArray) -> Iterator[Index]:
    """All of a parameter, piece by piece."""
    ranges = [range(0, n, step) for n, step in zip(array.shape, array.piece, strict=True)]
    for corner in itertools.product(*ranges):
        yield tuple(
            slice(first, min(first + step, n))
            for first, step, n in zip(corner, array.piece, array.shape, strict=True)
        )


def cast(array: LazyArray, dtype: np.dtype, name: str = "A parameter") -> LazyArray:
    """The same parameter, read as another dtype; see `in_dtype`."""
    return array._replace(dtype=dtype, read=lambda index: in_dtype(array.read(index), dtype, name))


def in_dtype(values: np.ndarray, dtype: np.dtype, name: str = "A parameter") -> np.ndarray:
    """The values in another dtype; raises where a number is too large for it.

    Args:
        values: what to cast.
        dtype: what to cast them to.
        name: the name of the values in errors.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        converted = values.astype(dtype)
    most = jnp.finfo(dtype)
    if most.maxexp < jnp.finfo(values.dtype).maxexp:
        lost = np.isinf(converted) & np.isfinite(values)
        if lost.any():
            raise UserError(
                f"{name} has the number {float(values[lost][0]):g}, and {dtype.name} ends at "
                f"{float(most.max):g}: choose another dtype, such as bfloat16."
            )
    return converted


def size_of(array: LazyArray) -> int:
    """How many bytes a parameter takes."""
    return math.prod(array.shape) * array.dtype.itemsize


def piece_of(shape: tuple[int, ...], itemsize: int, *, stacked: bool) -> tuple[int, ...]:
    """The shape of pieces of up to PIECE bytes, each of one layer."""
    piece = [1, *shape[1:]] if stacked else list(shape)
    while math.prod(piece) * itemsize > PIECE:
        longest = piece.index(max(piece))
        piece[longest] = math.ceil(piece[longest] / 2)
    return tuple(piece)
