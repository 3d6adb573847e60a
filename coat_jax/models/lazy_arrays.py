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
from coat_jax.models.creation import abstract
from coat_jax.models.llama import Llama
from coat_jax.models.protocol import ModelConfig
from coat_jax.nn import MeshAxes

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

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        """All of it."""
        return self.read((slice(None),) * len(self.shape))

    def transpose(self) -> "LazyArray":
        """Returns a matrix with its axes exchanged."""
        return LazyArray(
            self.shape[::-1], self.dtype, self.piece[::-1], lambda index: self.read(index[::-1]).T
        )


Parameters = Mapping[Name, LazyArray]


def dotted_name(path: Name) -> str:
    """Returns the path of a parameter as errors and `TrainConfig.frozen` name it."""
    return ".".join(map(str, path))


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
    require_parameters(config, parameters, module=module)
    graph, state = abstract(config, mesh=mesh, module=module)
    return fill(graph, state, arrange(parameters, scan=config.scan, stack=config.STACK))


def fill(graph: Any, state: Any, parameters: Parameters) -> Any:
    """The model of a graph and a state of shapes, dtypes and shardings, filled with values."""
    flat = {p: leaf.replace(place(parameters[p], leaf)) for p, leaf in nnx.to_flat_state(state)}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def place(array: LazyArray, leaf: Any) -> jax.Array:
    """A parameter on devices, with the dtype and the sharding of `leaf`."""
    array = cast(array, leaf.dtype)
    if leaf.sharding is None:
        return jax.device_put(array.whole())
    read: Any = array.read
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, read)


def parameters_of(model: Any) -> dict[Name, LazyArray]:
    """The parameters of a model, on devices of this process."""
    return {
        path: _on_devices(path, leaf[...], model.config)
        for path, leaf in nnx.to_flat_state(nnx.state(model))
    }


def _on_devices(path: Name, value: jax.Array, config: ModelConfig) -> LazyArray:
    if not value.is_fully_addressable:
        raise UserError(
            f"{dotted_name(path)} is spread over several hosts. Save a checkpoint with "
            "orbax, and convert that on one host."
        )
    piece = piece_of(value.shape, value.dtype.itemsize, stacked=config.is_stacked(path))
    return LazyArray(value.shape, value.dtype, piece, lambda index: np.asarray(value[index]))


def arrange(
    parameters: Parameters, *, scan: bool, stack: str = ModelConfig.STACK
) -> dict[Name, LazyArray]:
    """The same parameters, with those of all layers stacked (`scan`) or one by one.

    Args:
        parameters: of a model.
        scan: whether layers are to be stacked.
        stack: the name of the layers in paths.
    """
    found: dict[Name, LazyArray] = {}
    layers: dict[Name, dict[int, LazyArray]] = {}
    for name, one in parameters.items():
        at = name.index(stack) + 1 if stack in name else len(name)
        match name[at:]:
            case (int(layer), *rest) if scan:
                layers.setdefault((*name[:at], *rest), {})[layer] = one
            case (str(), *_) if not scan:
                for i in range(one.shape[0]):
                    found[(*name[:at], i, *name[at:])] = _one_of(one, i)
            case _:
                found[name] = one
    # A checkpoint may list layer 10 before layer 2.
    return found | {
        name: stack_of([ones[i] for i in sorted(ones)]) for name, ones in layers.items()
    }


def _one_of(one: LazyArray, layer: int) -> LazyArray:
    def read(index: Index) -> np.ndarray:
        part: np.ndarray = one.read((slice(layer, layer + 1), *index))[0]
        return part

    return LazyArray(one.shape[1:], one.dtype, one.piece[1:], read)


def stack_of(ones: Sequence[LazyArray]) -> LazyArray:
    """The parameters of layers in order, with a first axis over layers."""
    shape, piece = ones[0].shape, ones[0].piece
    dtype = np.result_type(*{one.dtype for one in ones})

    def read(index: Index) -> np.ndarray:
        chosen, inner = ones[index[0]], index[1:]
        sizes = (len(range(*i.indices(n))) for i, n in zip(inner, shape, strict=True))
        values = np.empty((len(chosen), *sizes), dtype)  # np.stack would need twice the memory
        for i, one in enumerate(chosen):
            values[i] = one.read(inner)
        return values

    return LazyArray((len(ones), *shape), dtype, (1, *piece), read)


def stacked_shapes(
    config: Any, *, module: Callable[..., Any] = Llama
) -> dict[Name, tuple[int, ...]]:
    """The shapes of a model's parameters, stacked: to build many layers one by one takes long."""
    stacked = dataclasses.replace(config, scan=True, axes=MeshAxes())
    _, state = abstract(stacked, module=module)
    return {path: leaf.shape for path, leaf in nnx.to_flat_state(state)}


def parameters_count(config: Any, *, module: Callable[..., Any] = Llama) -> int:
    """How many numbers a model has."""
    return sum(map(math.prod, stacked_shapes(config, module=module).values()))


def require_parameters(
    config: Any, parameters: Parameters, *, module: Callable[..., Any] = Llama
) -> None:
    """Raises unless these are the parameters of the model."""
    have = arrange(parameters, scan=True, stack=config.STACK)
    shapes = stacked_shapes(config, module=module)
    require_same("This model", shapes, {path: one.shape for path, one in have.items()})


def require_same(model: Any, needed: Mapping[Any, Any], have: Mapping[Any, Any]) -> None:
    """Raises unless a model has what it needs: shapes, by names or paths."""
    other = [name for name in needed if name in have and needed[name] != have[name]]
    for problem, found in (
        ("lacks", [(name, "") for name in needed if name not in have]),
        ("also has", [(name, "") for name in have if name not in needed]),
        ("has", [(name, f" {have[name]} instead of {needed[name]}") for name in other]),
    ):
        if found:
            names = sorted((n if isinstance(n, str) else dotted_name(n)) + how for n, how in found)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UserError(
                f"{model} does not match its config: it {problem} {', '.join(names[:5])}{more}."
            )


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
    """The values in another dtype; raises, and names them, where one is too large for it."""
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


def piece_of(shape: tuple[int, ...], itemsize: int, *, stacked: bool) -> tuple[int, ...]:
    """The shape of pieces of up to PIECE bytes, each of one layer."""
    piece = [1, *shape[1:]] if stacked else list(shape)
    while math.prod(piece) * itemsize > PIECE:
        longest = piece.index(max(piece))
        piece[longest] = math.ceil(piece[longest] / 2)
    return tuple(piece)
