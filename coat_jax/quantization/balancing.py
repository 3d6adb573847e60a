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
    down                   the columns of up, if they have no limit: act(gate) multiplies them

A projection without such a norm before it keeps its inputs. Each s is a power of two, so balancing
rounds nothing: a model that computes in BF16 or FP32 still computes the same numbers.

The method is that of SmoothQuant (Xiao et al., 2023), which divides by the scales of norms only.

A second balance is between queries and keys, for caches of keys in INT4, where the codes of a head
share a scale: q[j] k[j] = (q[j] s[j]) (k[j] / s[j]). A column and the one that it is rotated with
have one s, so that the rotation does not matter: s[j]^2 ~ max (k[j]^2 + k[j + H/2]^2). It goes into

    the scales of the norms of queries and keys; without them the columns of query and key

Queries are not stored, so nothing is lost. The method is that of FireQ (2025).
"""

from collections.abc import Iterable, Mapping

import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from coat_jax.errors import UserError
from coat_jax.models import Config, Llama, lazy_arrays
from coat_jax.models.lazy_arrays import Index, LazyArray, Name, Parameters, dotted_name
from coat_jax.quantization.calibration import Observed, observe
from coat_jax.quantization.projections import PROJECTIONS, name_of, require_quantizable

# Bounds of s, as exponents. A column that is small on the text grows to 4 times its size at most:
# on another text it may be as large as the others.
LEAST_EXPONENT, MOST_EXPONENT = -2, 12
NORMS = {
    "attention.norm.scale": ("attention.query", "attention.key", "attention.value"),
    "mlp.norm.scale": ("mlp.gate", "mlp.up"),
}

# Powers of two that a parameter is multiplied by: arrays of its shape, or of size 1 along an axis.
Factors = tuple[np.ndarray, ...]


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
    parameters = lazy_arrays.parameters_of(model)
    balanced = balance_parameters(model.config, parameters, observe(model, token_batches))
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    for name, one in balanced.items():
        if one is not parameters[name]:
            flat[name] = flat[name].replace(lazy_arrays.place(one, flat[name][...]))
    merged: Llama = nnx.merge(graph, nnx.from_flat_state(flat))
    return merged


def balance_parameters(
    config: Config, parameters: Parameters, observed: Observed
) -> dict[Name, LazyArray]:
    """`balance`, for parameters that are read in parts: each part is scaled when it is read.

    Args:
        config: of the model.
        parameters: of it, its layers stacked or not.
        observed: from `observe`, with all projections.
    """
    apart = lazy_arrays.arrange(parameters, scan=False)
    factors: dict[str, list[Factors]] = {}
    for i in range(config.layers):
        weights = {part: apart[name_of(f"layers.{i}.{part}")] for part in PROJECTIONS}
        inputs = {part: observed.inputs[f"layers.{i}.{part}"].columns for part in PROJECTIONS}
        of_keys = _factors_of_keys(config, observed.pairs[i])
        for part, found in _factors_of_layer(config, weights, inputs, of_keys).items():
            factors.setdefault(part, []).append(found)
    balanced = dict(parameters)
    for name, one in parameters.items():
        part = dotted_name(tuple(key for key in name[1:] if isinstance(key, str)))
        if of_layers := factors.get(part):
            layer = name[1]
            if isinstance(layer, int):
                found = of_layers[layer]
            else:
                found = tuple(map(np.stack, zip(*of_layers, strict=True)))
            balanced[name] = _scale_when_read(one, found)
    return balanced


def require_balanceable(config: Config) -> None:
    """Raises if powers of two may carry the parameters of a model out of their dtype's range."""
    if np.dtype(config.param_dtype) == np.float16:
        raise UserError(
            "Parameters in float16 cannot be balanced: multiplied by powers of two, some would "
            "leave its range. Use bfloat16 or float32; coat convert casts with --dtype float32."
        )


def _factors_of_layer(
    config: Config,
    weights: Mapping[str, LazyArray],
    inputs: Mapping[str, Float[np.ndarray, " K"]],
    of_keys: Mapping[str, Factors],
) -> dict[str, Factors]:
    """Returns the factors of a layer, `of_keys` among them.

    `inputs` are the largest magnitudes of columns.
    """
    found = dict(of_keys)

    def row_maxima(part: str) -> Float[np.ndarray, " K"]:
        """The largest magnitude in each row of a weight, when its columns have been scaled."""
        scaled = _scale_when_read(weights[part], found.get(part, ())).whole()
        largest: np.ndarray = np.abs(scaled.astype(np.float32)).max(axis=1)
        return largest

    # The values of one head are averaged by several heads of queries.
    by_head = config.kv_heads, config.heads // config.kv_heads, config.head_dim
    magnitudes = inputs["attention.out"], row_maxima("attention.out")
    s = _factors_of_columns(*(each.reshape(by_head).max(axis=1) for each in magnitudes))
    found["attention.out"] = (np.repeat(s, by_head[1], axis=0).reshape(-1, 1),)
    found["attention.value"] = (1 / s.reshape(1, -1),)
    if config.qkv_bias:
        found["attention.value_bias"] = (1 / s.ravel(),)

    if config.activation_limit is None:  # else a scaled column is clipped elsewhere
        s = _factors_of_columns(inputs["mlp.down"], row_maxima("mlp.down"))
        found["mlp.down"] = (s[:, None],)
        found["mlp.up"] = (1 / s[None],)

    if config.norms == "before" and config.norm == "rms":
        for norm, parts in NORMS.items():
            s = _factors_of_columns(inputs[parts[0]], np.max([*map(row_maxima, parts)], axis=0))
            found[norm] = (1 / s,)
            found |= {part: (*found.get(part, ()), s[:, None]) for part in parts}
    return found


def _factors_of_keys(config: Config, pairs: Float[np.ndarray, "K P"]) -> dict[str, Factors]:
    """Returns the factors of queries and keys, from the largest magnitudes of pairs of columns."""
    groups = config.heads // config.kv_heads
    if config.qk_norm == "head":  # all heads have one scale
        pairs, groups = pairs.max(axis=0, keepdims=True), 1
    squares = np.square(pairs, dtype=np.float64)
    s = np.stack([_factors_of_columns(of_head, np.ones(len(of_head))) for of_head in squares])
    of_keys = np.concatenate([s, s], axis=1)  # columns j and j + H/2
    of_queries = np.repeat(of_keys, groups, axis=0).ravel()
    factors = {"query": of_queries, "key": 1 / of_keys.ravel()}
    if config.qk_norm is not None:
        return {f"attention.{name}_norm.scale": (each,) for name, each in factors.items()}
    found: dict[str, Factors] = {f"attention.{name}": (f[None],) for name, f in factors.items()}
    if config.qkv_bias:
        found |= {f"attention.{name}_bias": (each,) for name, each in factors.items()}
    return found


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


def _scale_when_read(one: LazyArray, factors: Factors) -> LazyArray:
    def read(index: Index) -> np.ndarray:
        values = one.read(index)
        for factor in factors:
            values = values * np.broadcast_to(factor.astype(values.dtype), one.shape)[index]
        return values

    return one._replace(read=read)
