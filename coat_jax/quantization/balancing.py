"""Balancing: a model that computes the same, with outliers shared between inputs and weights.

    x[t, k] w[k, n] = (x[t, k] / s[k]) (s[k] w[k, n])        s[k]^2 ~ max |x[:, k]| / max |w[k]|

An outlier is a column of an input that is much larger than the others. INT8 gives all columns of a
token one scale, so an outlier leaves few codes to the others. After balancing, a column of x is as
large relative to the other columns as its row of w is relative to the other rows. A column that was
100 times as large in x alone is 10 times as large in x and in w; one whose weights were 100 times
smaller is no outlier any more.

s becomes part of the parameters, so it costs nothing. The layer before the projection divides x:

    query, key, value      the scale of the norm
    gate, up               the scale of the norm
    out                    the columns of value: attention takes means of each column
    down                   the columns of up: the activation of gate is multiplied by them

A projection without such a norm before it keeps its inputs. Each s is a power of two, so balancing
rounds nothing: a model that computes in BF16 or FP32 still computes the same numbers.

The method is that of SmoothQuant (Xiao et al., 2023), which divides by the scales of norms only.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from coat_jax.errors import UserError
from coat_jax.models import Config, Llama, lazy_arrays
from coat_jax.models.lazy_arrays import Index, LazyArray, Name, Parameters
from coat_jax.quantization.calibration import Ranges, observe, require_finite
from coat_jax.quantization.projections import SHARING, name_of, require_quantizable

# Bounds of s, as exponents. A column that is small on the text grows to 4 times its size at most:
# on another text it may be as large as the others.
LEAST_EXPONENT, MOST_EXPONENT = -2, 12
PROJECTIONS = [part for sharing in SHARING for part in sharing]
NORMS = {
    "attention.norm.scale": ("attention.query", "attention.key", "attention.value"),
    "mlp.norm.scale": ("mlp.gate", "mlp.up"),
}


class Factors(NamedTuple):
    """Powers of two that a parameter is multiplied by.

    Attributes:
        rows: one for each row of a weight.
        columns: one for each column of a weight, or for each element of a vector.
    """

    rows: Float[np.ndarray, " K"] | None = None
    columns: Float[np.ndarray, " N"] | None = None


def balance(model: Llama, token_batches: Iterable[Int[ArrayLike, "B S"]]) -> Llama:
    """A model whose projections are balanced, and which computes the same.

    Arrays that balancing does not change are shared with `model`; the others take as much memory
    again, until `model` is deleted. It runs in one process.

    Args:
        model: not quantized, of any precision, its parameters in FP32 or BF16.
        token_batches: of a text, on which the inputs are seen; see `calibrate`.
    """
    require_quantizable(model)
    require_balanceable(model.config)
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    config = model.config

    def read(name: Name) -> np.ndarray:
        if name in flat:
            return np.asarray(flat[name][...])
        layers, layer, *rest = name
        return np.asarray(flat[layers, *rest][...][layer])

    factors = find_factors(config, read, observe(model, token_batches))
    if config.scan:
        factors = _stacked(factors)
    for name, of_parameter in factors.items():
        leaf = flat[name]
        flat[name] = leaf.replace(_scaled(leaf[...], of_parameter))
    balanced: Llama = nnx.merge(graph, nnx.from_flat_state(flat))
    return balanced


def balance_parameters(
    parameters: Parameters, factors: Mapping[Name, Factors]
) -> dict[Name, LazyArray]:
    """`balance`, for parameters that are read in parts: each part is scaled when it is read.

    Args:
        parameters: of a model, its layers stacked or not.
        factors: from `find_factors`.
    """
    scan = not any(isinstance(name[1], int) for name in parameters if name[0] == "layers")
    apart = dict(lazy_arrays.arranged(parameters, scan=False))
    for name, of_parameter in factors.items():
        apart[name] = _scaled_when_read(apart[name], of_parameter)
    return dict(lazy_arrays.arranged(apart, scan=scan))


def require_balanceable(config: Config) -> None:
    """Raises if powers of two may carry the parameters of a model out of their dtype's range."""
    if np.dtype(config.param_dtype) == np.float16:
        raise UserError(
            "Parameters in float16 cannot be balanced: multiplied by powers of two, some would "
            "leave its range. Use bfloat16 or float32; coat convert casts with --dtype."
        )


def find_factors(
    config: Config, read: Callable[[Name], np.ndarray], ranges: Ranges
) -> dict[Name, Factors]:
    """What parameters are multiplied by, named as in a model whose layers are not stacked.

    Args:
        config: of the model.
        read: reads the weight of such a name.
        ranges: of the inputs of all projections, from `observe`.
    """
    found: dict[Name, Factors] = {}
    for i in range(config.layers):
        paths = {part: f"layers.{i}.{part}" for part in PROJECTIONS}
        for path in paths.values():
            require_finite(path, ranges[path])
        weights = {part: read(name_of(path)) for part, path in paths.items()}
        inputs = {part: ranges[path].columns for part, path in paths.items()}
        of_layer = _factors_of_layer(config, weights, inputs)
        found |= {name_of(f"layers.{i}.{part}"): factors for part, factors in of_layer.items()}
    return found


def _factors_of_layer(
    config: Config,
    weights: Mapping[str, Float[np.ndarray, "K N"]],
    inputs: Mapping[str, Float[np.ndarray, " K"]],
) -> dict[str, Factors]:
    """What a layer's parameters are multiplied by; `inputs` are the columns' largest magnitudes."""
    found = {part: Factors() for part in PROJECTIONS}

    def row_maxima(part: str) -> Float[np.ndarray, " K"]:
        """The largest magnitude in each row of a weight, when its columns have been scaled."""
        scaled = _scaled(weights[part], found[part])
        largest: np.ndarray = np.abs(scaled.astype(np.float32)).max(axis=1)
        return largest

    # The values of one head are averaged by several heads of queries.
    by_head = config.kv_heads, config.heads // config.kv_heads, config.head_dim
    magnitudes = inputs["attention.out"], row_maxima("attention.out")
    s = _factors_of_columns(*(each.reshape(by_head).max(axis=1) for each in magnitudes))
    found["attention.out"] = Factors(rows=np.repeat(s, by_head[1], axis=0).ravel())
    found["attention.value"] = Factors(columns=1 / s.ravel())
    if config.qkv_bias:
        found["attention.value_bias"] = Factors(columns=1 / s.ravel())

    s = _factors_of_columns(inputs["mlp.down"], row_maxima("mlp.down"))
    found["mlp.down"] = Factors(rows=s)
    found["mlp.up"] = Factors(columns=1 / s)

    if config.norms == "before" and config.norm == "rms":
        for norm, parts in NORMS.items():
            s = _factors_of_columns(inputs[parts[0]], np.max([*map(row_maxima, parts)], axis=0))
            found[norm] = Factors(columns=1 / s)
            found |= {part: found[part]._replace(rows=s) for part in parts}
    return {part: factors for part, factors in found.items() if any(f is not None for f in factors)}


def _factors_of_columns(
    columns: Float[np.ndarray, "*K"], rows: Float[np.ndarray, "*K"]
) -> Float[np.ndarray, "*K"]:
    """s, from the largest magnitude in each column of an input and in its row of the weight.

    It is 1 for a typical column, and for one that is zero or multiplied by zeros.
    """
    used = (columns > 0) & (rows > 0)
    powers = np.zeros(columns.shape, np.float32)
    if used.any():
        powers[used] = (np.log2(columns[used]) - np.log2(rows[used])) / 2
        powers[used] -= np.median(powers[used])
    return np.exp2(np.clip(np.rint(powers), LEAST_EXPONENT, MOST_EXPONENT))


def _scaled(values: Any, factors: Factors) -> Any:
    """A parameter of one layer, or of all layers stacked, multiplied by its factors."""
    rows, columns = (None if f is None else f.astype(values.dtype) for f in factors)
    if rows is not None:
        values = values * rows[..., None]
    if columns is not None:
        values = values * (columns if columns.ndim == values.ndim else columns[..., None, :])
    return values


def _scaled_when_read(one: LazyArray, factors: Factors) -> LazyArray:
    def read(index: Index) -> np.ndarray:
        rows, columns = factors
        of_part = Factors(
            None if rows is None else rows[index[0]],
            None if columns is None else columns[index[-1]],
        )
        part: np.ndarray = _scaled(one.read(index), of_part)
        return part

    return one._replace(read=read)


def _stacked(factors: Mapping[Name, Factors]) -> dict[Name, Factors]:
    """The factors of all layers together, layer after layer, as for parameters that are stacked."""
    together: dict[Name, list[Factors]] = {}
    for (layers, _, *part), of_layer in factors.items():
        together.setdefault((layers, *part), []).append(of_layer)
    return {
        name: Factors(
            *(None if each[0] is None else np.stack(each) for each in zip(*ones, strict=True))
        )
        for name, ones in together.items()
    }
