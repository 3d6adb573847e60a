"""Which small format suits each tensor of a model: `coat formats`.

    weights      each matrix, rounded to every format by `numerics.quantizer`
    in_training  each tensor that linear layers round when they train on a text: weights, inputs and
                 gradients, each with one power of two as its scale, as in training

The measure is the number of bits that are right, log2 of rms(x) / rms(error). If a format holds a
tensor exactly, EXACT bits are right.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from coat_jax import telemetry
from coat_jax.errors import UserError
from coat_jax.models import Batch, Config, Llama
from coat_jax.models.lazy_arrays import LazyArray, Name, Parameters, arrange
from coat_jax.numerics.formats import DTYPES
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.numerics.quantizer import Quantizer, sqnr_bits
from coat_jax.precision import Precision

EXACT = 24.0  # the significant bits of FP32
EMBEDDING: Name = ("embed",)


class Row(NamedTuple):
    """A tensor, and how many bits are right in each format."""

    tensor: str
    shape: tuple[int, ...] | None
    bits: dict[str, float]

    @property
    def best(self) -> str:
        """The format with the most bits that are right; the first one in a tie."""
        return max(self.bits, key=self.bits.__getitem__)


def weights(
    parameters: Parameters, quantizers: Sequence[Quantizer], *, sample: int
) -> Iterator[Row]:
    """A `Row` for each matrix of a model, one after another.

    About `sample` elements of a matrix are rounded, in evenly spaced whole channels or rows; all of
    them for 0.
    """
    for name, one in arrange(parameters, scan=False).items():
        if len(one.shape) < 2:
            continue  # norms and biases are not rounded
        tensor = ".".join(map(str, name))
        # The channels of an embedding are its rows: one for each token.
        axis = 0 if name == EMBEDDING else -1
        x = _sample(one, quantizers[0], axis, sample)
        _require_finite(tensor, x)
        of_axis = (dataclasses.replace(quantizer, axis=axis) for quantizer in quantizers)
        yield Row(
            tensor, one.shape, {q.format.label: min(float(_bits(q, x)), EXACT) for q in of_axis}
        )


def in_training(
    load: Callable[[Config], Llama], config: Config, formats: list[Minifloat], tokens: list[int]
) -> list[Row]:
    """A `Row` for each tensor that linear layers round on a text, forward and backward.

    The precision of the config is replaced before `load` loads the model.
    """
    batch = jnp.asarray(tokens, jnp.int32)[None]
    labels = jnp.concatenate([batch[:, 1:], jnp.full((1, 1), -100)], axis=1)
    rows: dict[str, dict[str, float]] = {}
    for fmt in formats:
        simulated = _simulate(fmt).name
        precision = Precision(forward=simulated, backward=simulated, block=None)
        graph, params = nnx.split(load(dataclasses.replace(config, precision=precision)))

        def loss(params: Any, graph: Any = graph) -> Any:
            return nnx.merge(graph, params).loss(Batch(batch, labels)).mean

        for tensor, found in telemetry.measure(loss, params).items():
            _require_finite(tensor, found.error)
            bits = -float(np.log2(found.error)) if found.error else EXACT
            rows.setdefault(tensor, {})[fmt.label] = min(bits, EXACT)
    return [Row(tensor, None, bits) for tensor, bits in rows.items()]


def _require_finite(tensor: str, x: Any) -> None:
    if not np.isfinite(x).all():
        raise UserError(f"{tensor} has a NaN or an infinity: no format suits it.")


@partial(jax.jit, static_argnums=0)
def _bits(quantizer: Quantizer, x: Float[Array, "K N"]) -> Float[Array, ""]:
    bits = sqnr_bits(x, quantizer(x))
    return jnp.where(jnp.isnan(bits), jnp.inf, bits)  # NaN: all zeros, which are exact


def _sample(
    one: LazyArray, quantizer: Quantizer, axis: int, sample: int
) -> Float[np.ndarray, "K N"]:
    """A matrix in FP32, or some whole channels or rows of it: their scales stay the same."""
    x = one.whole().astype(np.float32)
    x = x.reshape(-1, x.shape[-1])
    along = axis if quantizer.over == "channel" else 0
    count = x.shape[along]
    chosen = count if not sample else min(count, max(1, sample * count // x.size))
    return np.take(x, np.linspace(0, count - 1, chosen).astype(int), axis=along)


def _simulate(fmt: Minifloat) -> Minifloat:
    """A format that XLA simulates in products.

    E4M3 and E5M2 get another bias, which scales compensate. Their own dtypes would be multiplied in
    FP8, and no hardware multiplies E5M2 by E5M2.
    """
    assert fmt.bias is not None
    return dataclasses.replace(fmt, bias=fmt.bias + 1) if fmt.name in DTYPES else fmt
