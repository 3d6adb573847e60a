"""Which small format suits each tensor of a model: `coat formats`.

    weights      each matrix, rounded to every format by `numerics.quantizer`
    in_training  each tensor that linear layers round when they train on a text: weights, inputs and
                 gradients, each with one power of two as its scale, as in training

The measure is the number of bits that are right, log2 of rms(x) / rms(error). If a format holds a
tensor exactly, EXACT bits are right.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from coat_jax import telemetry
from coat_jax.errors import UserError
from coat_jax.models import Batch, Llama, abstract
from coat_jax.models.lazy_arrays import Name, Parameters, arrange, dotted_name
from coat_jax.numerics.formats import DTYPES
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.numerics.quantizer import Quantizer, sqnr_bits
from coat_jax.precision import Precision

EXACT = 24.0  # the significant bits of FP32
SAMPLE = 1 << 20  # elements of a matrix that are rounded, about
EMBEDDING: Name = ("embed",)


class Row(NamedTuple):
    """A tensor, and how many bits are right in each format."""

    tensor: str
    bits: dict[str, float]

    @property
    def best(self) -> str:
        """The format with the most bits; the first one in a tie."""
        return max(self.bits, key=self.bits.__getitem__)


def weights(parameters: Parameters, quantizers: Sequence[Quantizer]) -> Iterator[Row]:
    """Yields a `Row` for each matrix of a model, from SAMPLE elements of it.

    Args:
        parameters: of the model.
        quantizers: one for each format, with channels along axis 0.
    """
    for name, one in arrange(parameters, scan=False).items():
        if len(one.shape) < 2:
            continue  # norms and biases are not rounded
        x = one.whole().astype(np.float32).reshape(-1, one.shape[-1])
        # The channels of an embedding are its rows: one for each token.
        if quantizers[0].over == "channel" and name != EMBEDDING:
            x = x.T
        x = x[:: max(1, x.size // SAMPLE)]  # whole channels or rows: their scales stay the same
        _require_finite(dotted_name(name), x)
        bits = {q.format.label: float(_bits(q, x)) for q in quantizers}
        yield Row(dotted_name(name), bits)


def in_training(model: Llama, formats: Sequence[Minifloat], tokens: Sequence[int]) -> list[Row]:
    """Returns a `Row` for each tensor that linear layers round on a text, forward and backward."""
    text = jnp.asarray([tokens], jnp.int32)
    batch, params = Batch(text[:, :-1], text[:, 1:]), nnx.state(model)
    rows: dict[str, dict[str, float]] = {}
    for fmt in formats:
        simulated = _simulate(fmt).name
        precision = Precision(forward=simulated, backward=simulated, block=None)
        graph, _ = abstract(dataclasses.replace(model.config, precision=precision))

        def loss(params: Any, graph: Any = graph) -> Any:
            return nnx.merge(graph, params).loss(batch).mean

        for tensor, found in telemetry.measure(loss, params).items():
            _require_finite(tensor, found.error)
            bits = -float(np.log2(max(found.error, 2.0**-EXACT)))
            rows.setdefault(tensor, {})[fmt.label] = bits
    return [Row(tensor, bits) for tensor, bits in rows.items()]


def _require_finite(tensor: str, x: Any) -> None:
    if not np.isfinite(x).all():
        raise UserError(f"{tensor} has a NaN or an infinity: no format suits it.")


@partial(jax.jit, static_argnums=0)
def _bits(quantizer: Quantizer, x: Float[Array, "K N"]) -> Float[Array, ""]:
    # Of zeros, which are exact, `sqnr_bits` is NaN, which fmin ignores.
    return jnp.fmin(sqnr_bits(x, quantizer(x)), EXACT)


def _simulate(fmt: Minifloat) -> Minifloat:
    """Returns a format that XLA simulates in products.

    E4M3 and E5M2 get another bias, which scales compensate. Their own dtypes would be multiplied in
    FP8, and no hardware multiplies E5M2 by E5M2.
    """
    assert fmt.bias is not None
    return dataclasses.replace(fmt, bias=fmt.bias + 1) if fmt.name in DTYPES else fmt
