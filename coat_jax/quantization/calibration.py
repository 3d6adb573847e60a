"""Calibration: statistics of the inputs of a model's layers on some text.

    for each batch of tokens:  the model runs once, layer by layer, in full precision
        for each input:        a histogram of its magnitudes is added to that of earlier batches

No activations are stored. A histogram has 32 bins in each binade of FP32, 8192 in all, so that no
range has to be known in advance, and every element is counted. Ranges by percentile or least
squared error are computed from it, as if the elements of a bin, whose ends differ by 3 % at most,
were spread evenly. The largest element is exact.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from coat_jax.errors import UserError
from coat_jax.models import Llama
from coat_jax.models.batches import require_known
from coat_jax.models.lazy_arrays import dotted_name
from coat_jax.models.llama import require_tokens
from coat_jax.nn.children import set_class
from coat_jax.nn.modular import Dense, ModularAttention
from coat_jax.numerics import eight_bits
from coat_jax.numerics.eight_bits import EightBits
from coat_jax.numerics.quantizer import COARSE, FINE, Fit
from coat_jax.ops.quantized import row_scales
from coat_jax.quantization.projections import (
    groups_without,
    paths_of,
    replace_projections,
    require_int4_inputs,
    unstack,
)
from coat_jax.quantization.recipe import CANDIDATES, Recipe

SHIFT = 18  # the bits of FP32 that a bin leaves out: it has 5 bits of the mantissa
BINS = 1 << (31 - SHIFT)
FIRST_NOT_FINITE = 0xFF << (23 - SHIFT)
KEYS = "attention"  # the path in a layer of what is measured of keys
POINTS = 4  # of a bin, where errors are computed


class Inputs(NamedTuple):
    """Statistics of the inputs of a projection.

    Attributes:
        counts: of elements, by bins of their magnitude.
        columns: the largest magnitude in each column.
        squares: the sum over all elements.
        row_errors: the sum of squared errors of dynamic rounding, in each of CANDIDATES.
        products: X^T X of all inputs X, where weights in INT4 compensate for errors.
    """

    counts: Int[np.ndarray, " bins"]
    columns: Float[np.ndarray, " K"]
    squares: float
    row_errors: Float[np.ndarray, "2"]
    products: Float[np.ndarray, "K K"] | None = None

    @property
    def largest(self) -> float:
        """The largest magnitude of all."""
        return float(self.columns.max())

    def __add__(self, other: "Inputs") -> "Inputs":  # type: ignore[override]
        """The statistics of both texts together."""
        return Inputs(
            self.counts + other.counts,
            np.maximum(self.columns, other.columns),
            self.squares + other.squares,
            self.row_errors + other.row_errors,
            None if self.products is None else self.products + other.products,
        )


Ranges = Mapping[str, Inputs]  # by the path of a projection


class Observed(NamedTuple):
    """What a model computes with on a text.

    Attributes:
        inputs: of each projection that is observed.
        pairs: of keys [K, H / 2] in each layer: the largest magnitude of what a rotation mixes,
            sqrt(k[j]^2 + k[j + H/2]^2), which it leaves as it is.
    """

    inputs: dict[str, Inputs]
    pairs: list[Float[np.ndarray, "K P"]]


def calibrate(
    model: Llama, token_batches: Iterable[Int[ArrayLike, "B S"]], recipe: Recipe
) -> dict[str, Inputs]:
    """Statistics of the inputs of the projections that `recipe` quantizes, on a text.

    Args:
        model: not quantized.
        token_batches: tokens of the text, each batch [batch, sequence]; batches of one shape
            share a program.
        recipe: for `quantize`.
    """
    recipe.require_matches(paths_of(model.config))
    groups = groups_without(model.config, recipe.is_left) if recipe.format == "int4" else []
    require_int4_inputs(model.config, itertools.chain(*groups))
    found = observe(model, token_batches, recipe.is_left, [group[0] for group in groups]).inputs
    for first, *others in groups:
        found |= {path: found[path]._replace(products=found[first].products) for path in others}
    for path, inputs in found.items():
        if recipe.needs_calibration and inputs.largest < eight_bits.SMALLEST_SCALE:
            raise UserError(
                f"The inputs of {path} are all zero on the calibration text: their range is empty. "
                "Calibrate on more text, or leave this projection as it is."
            )
    return found


def observe(
    model: Llama,
    token_batches: Iterable[Int[ArrayLike, "B S"]],
    is_left: Callable[[str], bool] = lambda path: False,
    sums_products: Collection[str] = (),
) -> Observed:
    """Statistics of all projections' inputs but those that are `is_left`, and of keys.

    No range is checked. Products are summed only of the inputs of the projections that are named.
    """

    def make(path: str, kernel: nnx.Param, bias: nnx.Param | None) -> Dense:
        if is_left(path):
            return Dense(kernel, bias)
        return _Observed(kernel, bias, path in sums_products)

    observed = replace_projections(unstack(model), make)
    for block in observed.layers:
        set_class(block.attention, _ObservedAttention)
    blocks = [nnx.split(block) for block in observed.layers]
    found: dict[str, Inputs] = {}
    pairs: dict[int, np.ndarray] = {}
    for batch in token_batches:
        tokens = np.asarray(batch)  # JAX would truncate 64 bits to 32
        require_tokens(model.config, tokens)
        require_known("The calibration text has", tokens.ravel(), model.config.vocab)
        if tokens.size == 0:
            continue
        x = observed.embed_tokens(jnp.asarray(tokens, jnp.int32))
        for i, (graph, state) in enumerate(blocks):
            x, seen = _run_layer(graph, state, x)
            largest = np.asarray(seen.pop(KEYS))
            pairs[i] = np.maximum(pairs.get(i, 0), largest)
            for name, of_input in seen.items():
                path, inputs = f"layers.{i}.{name}", to_host(of_input)
                found[path] = found[path] + inputs if path in found else inputs
    if not found:
        raise UserError("The calibration text is empty: it has no tokens.")
    found = {path: found[path] for path in paths_of(model.config) if path in found}
    for path, inputs in found.items():
        squares = inputs.squares
        if inputs.products is not None:  # if the diagonal is finite, all of them are
            squares += np.trace(inputs.products, dtype=np.float64)
        if inputs.counts[FIRST_NOT_FINITE:].any() or not np.isfinite(squares):
            raise UserError(
                f"The inputs of {path} are not finite on the calibration text: the model's "
                "parameters are damaged, or its numbers exceed its dtype."
            )
    return Observed(found, [pairs[i] for i in range(model.config.layers)])


def input_scale(inputs: Inputs, name: EightBits, recipe: Recipe) -> float:
    """The scale of static activations."""
    scale = _range_of(inputs, name, recipe) / eight_bits.LARGEST[name]
    return max(scale, eight_bits.SMALLEST_SCALE)


def input_noise(inputs: Inputs, name: EightBits, recipe: Recipe) -> float:
    """The squared error of rounding inputs over their squares; 0 where they are not rounded."""
    if recipe.activations == "none":
        return 0.0
    if recipe.activations == "dynamic":
        return float(inputs.row_errors[CANDIDATES.index(name)]) / inputs.squares
    values, weights = _points(inputs)
    high = _range_of(inputs, name, recipe)
    return _error(values, weights, high, name) / float(weights @ np.square(values))


# --- Ranges from histograms ------------------------------------------------------------------


def _range_of(inputs: Inputs, name: EightBits, recipe: Recipe) -> float:
    """The largest magnitude that a static scale has a code for."""
    fit: Fit = recipe.activation_fit
    if fit == "max":
        return inputs.largest
    if fit == "percentile":
        return _percentile(inputs, recipe.percentile / 100)
    values, weights = _points(inputs)
    best = inputs.largest
    for shares in (COARSE, FINE):
        ranges = np.minimum(best * shares, inputs.largest)
        errors = [_error(values, weights, high, name) for high in ranges]
        best = float(ranges[int(np.argmin(errors))])
    return best


def _percentile(inputs: Inputs, share: float) -> float:
    """The magnitude that this share of all elements does not exceed."""
    below = np.cumsum(inputs.counts)
    wanted = share * below[-1]
    i = int(np.searchsorted(below, wanted))
    into = 1 - (below[i] - wanted) / inputs.counts[i]
    low, high = _edges(np.array([i, i + 1]))
    return min(float(low + into * (high - low)), inputs.largest)


def _points(inputs: Inputs) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
    """Magnitudes that stand for those in the bins, and how many elements each stands for."""
    bins = np.flatnonzero(inputs.counts)
    low, high = _edges(bins)[:, None], _edges(bins + 1)[:, None]
    values = low + (high - low) * (np.arange(POINTS) + 0.5) / POINTS
    values = np.where(bins[:, None] == 0, 0.0, np.minimum(values, inputs.largest))
    return values.ravel(), np.repeat(inputs.counts[bins] / POINTS, POINTS)


def _edges(bins: Int[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
    """The smallest magnitudes of bins."""
    return (bins.astype(np.uint32) << SHIFT).view(np.float32).astype(np.float64)


def _error(
    values: Float[np.ndarray, " P"], weights: Float[np.ndarray, " P"], high: float, name: EightBits
) -> float:
    """The squared error of rounding with a scale for magnitudes up to `high`."""
    scale = high / eight_bits.LARGEST[name]
    scaled = np.minimum(values / scale, eight_bits.LARGEST[name])
    codes = scaled.astype(eight_bits.DTYPES[name]) if name == "fp8" else np.rint(scaled)
    return float(weights @ np.square(codes.astype(np.float64) * scale - values))


# --- One pass --------------------------------------------------------------------------------


class _Observed(Dense):
    """A projection that counts its inputs, and may sum their products."""

    def __init__(self, kernel: nnx.Param, bias: nnx.Param | None, sums_products: bool):
        super().__init__(kernel, bias)
        self.sums_products = sums_products

    def __call__(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows N"]:
        """Applies the layer to the last axis."""
        self.seen = nnx.Intermediate(statistics(x, self.sums_products))
        return super().__call__(x)


class _ObservedAttention(ModularAttention):
    """Attention that measures its keys."""

    def _heads(self, x: Float[Array, "B S D"], positions: Array | None) -> Any:
        x, q, k, v = super()._heads(x, positions)
        a, b = jnp.split(k.astype(jnp.float32), 2, axis=-1)
        self.seen = nnx.Intermediate(jnp.max(jnp.hypot(a, b), axis=(0, 1)))
        return x, q, k, v


def statistics(x: Float[Array, "*rows K"], sums_products: bool = False) -> Any:
    """The fields of Inputs on a device, sums of squares in units of the largest magnitude's."""
    rows, products = x.reshape(-1, x.shape[-1]), None
    if sums_products:
        products = jnp.matmul(rows.T, rows, preferred_element_type=jnp.float32)
    wide = x.astype(jnp.float32)
    magnitudes = jnp.abs(wide)
    bins = lax.bitcast_convert_type(magnitudes, jnp.int32) >> SHIFT
    counts = jnp.zeros(BINS, jnp.int32).at[bins.ravel()].add(1)
    columns = jnp.max(magnitudes, axis=tuple(range(x.ndim - 1)))
    largest = jnp.max(columns)
    unit = jnp.where(largest > 0, largest, 1.0)  # FP32 may not hold the squares themselves
    errors = []
    for name in CANDIDATES:
        error = eight_bits.rounded(x, row_scales(x, name), name) - wide
        errors.append(jnp.sum(jnp.square(error / unit)))
    return counts, columns, jnp.sum(jnp.square(wide / unit)), jnp.stack(errors), products


def to_host(found: Any) -> Inputs:
    """Converts the result of `statistics` to FP64."""
    counts, columns, squares, errors, products = jax.device_get(found)
    unit = np.square(columns.max().astype(np.float64))
    counts = counts.astype(np.int64)
    return Inputs(counts, columns, float(unit * squares), unit * errors, products)


@partial(jax.jit, static_argnums=0)
def _run_layer(graph: Any, state: Any, x: Float[Array, "B S D"]) -> tuple[Array, dict[str, Any]]:
    """The residual stream after a layer, and the statistics of keys and projections' inputs."""
    block = nnx.merge(graph, state)
    y = block(x)
    seen = nnx.to_flat_state(nnx.state(block, nnx.Intermediate))
    return y, {dotted_name(path[:-1]): leaf.get_value() for path, leaf in seen}
