"""Which small format suits each tensor of a model: `coat formats`.

    weights      each matrix, rounded to every format by `numerics.quantizer`
    in_training  each tensor that linear layers round when they train on a text: weights, inputs and
                 gradients, each with one power of two as its scale, as in training

The measure is the number of bits that are right, log2 of rms(x) / rms(error). If a format holds a
tensor exactly, EXACT bits are right.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from coat_jax import telemetry
from coat_jax.errors import UserError
from coat_jax.models import Config, Llama
from coat_jax.models.stored import Name, Parameters, Stored, arranged
from coat_jax.numerics.formats import DTYPES
from coat_jax.numerics.integer_format import IntegerFormat
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.numerics.quantizer import AnyFormat, Quantizer, sqnr_bits
from coat_jax.precision import Precision
from coat_jax.training.report.chart import LINES, styled_figure
from coat_jax.training.report.output import save_figure

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

    Args:
        parameters: the parameters of the model.
        quantizers: one for each format, with the same other settings.
        sample: about how many elements of a matrix are rounded, in evenly spaced whole channels or
            rows; 0 for all. The whole matrix is read.
    """
    run = jax.jit(_bits, static_argnums=0)
    for name, one in arranged(parameters, scan=False).items():
        if len(one.shape) < 2:
            continue  # norms and biases are not rounded
        tensor = ".".join(map(str, name))
        # The channels of an embedding are its rows: one for each token.
        axis = 0 if name == EMBEDDING else -1
        x = _sampled(one, quantizers[0], axis, sample)
        if not np.isfinite(x).all():
            raise UserError(f"{tensor} has a NaN or an infinity: no format suits it.")
        x = _near_one(x)
        of_axis = (dataclasses.replace(quantizer, axis=axis) for quantizer in quantizers)
        found = {q.format.name: min(float(run(q, x)), EXACT) for q in of_axis}
        yield Row(tensor, one.shape, found)


def in_training(
    load: Callable[[Config], Llama],
    config: Config,
    formats: Sequence[AnyFormat],
    tokens: Sequence[int],
) -> list[Row]:
    """A `Row` for each tensor that linear layers round on a text, forward and backward.

    Args:
        load: loads the model of a config.
        config: the config of the model; its precision is replaced.
        formats: formats with a sign.
        tokens: the text.
    """
    batch = jnp.asarray(tokens, jnp.int32)[None]
    labels = jnp.concatenate([batch[:, 1:], jnp.full((1, 1), -100)], axis=1)
    rows: dict[str, dict[str, float]] = {}
    for fmt in formats:
        simulated = _simulated(fmt).name
        precision = Precision(forward=simulated, backward=simulated, block=None)
        model = load(dataclasses.replace(config, precision=precision))
        graph, params = nnx.split(model)

        def loss(params: Any, graph: Any = graph) -> Array:
            return nnx.merge(graph, params).loss(batch, labels)

        for tensor, found in telemetry.measure(loss, params).items():
            bits = EXACT if found.error == 0 else -float(np.log2(found.error))
            if not np.isfinite(bits):
                raise UserError(f"{tensor} has a NaN or an infinity: no format suits it.")
            rows.setdefault(tensor, {})[fmt.name] = min(bits, EXACT)
    return [Row(tensor, None, bits) for tensor, bits in rows.items()]


def draw(tables: Mapping[str, Sequence[Row]], out: Path) -> None:
    """Writes a picture: one panel per kind of tensor, one line per format over the layers."""
    panels: dict[str, list[Row]] = {}
    for rows in tables.values():
        for row in rows:
            panels.setdefault(kind_of(row.tensor), []).append(row)
    formats = list(next(iter(panels.values()))[0].bits)
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    with styled_figure((3.2 * columns, 2.3 * lines)) as figure:
        axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
        for panel in axes.flat[len(panels) :]:
            panel.set_axis_off()
        for panel, (kind, rows) in zip(axes.flat, panels.items(), strict=False):
            for i, name in enumerate(formats):
                bits = [row.bits[name] for row in rows]
                panel.plot(bits, ".-", color=LINES[i % len(LINES)], lw=1.2, ms=4, label=name)
            panel.set_title(kind, fontsize=8)
            panel.set_xticks([] if len(rows) == 1 else [0, len(rows) - 1])
        for panel in axes[:, 0]:
            panel.set_ylabel("bits that are right", fontsize=8)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper")
        save_figure(figure, out)


def kind_of(tensor: str) -> str:
    """The name of a tensor without the number of its layer."""
    separator = "/" if "/" in tensor else "."
    return separator.join(part for part in tensor.split(separator) if not part.isdecimal())


def _bits(quantizer: Quantizer, x: Float[Array, "K N"]) -> Float[Array, ""]:
    bits = sqnr_bits(x, quantizer(x))
    return jnp.where(jnp.isnan(bits), jnp.inf, bits)  # NaN: all zeros, which are exact


def _sampled(one: Stored, quantizer: Quantizer, axis: int, sample: int) -> Float[np.ndarray, "K N"]:
    """A matrix in FP32, or some whole channels or rows of it: their scales stay the same."""
    x = one.whole().astype(np.float32)
    x = x.reshape(-1, x.shape[-1])
    along = axis if quantizer.over == "channel" else 0
    count = x.shape[along]
    chosen = count if not sample else min(count, max(1, sample * count // x.size))
    return np.take(x, np.linspace(0, count - 1, chosen).astype(int), axis=along)


def _near_one(x: Float[np.ndarray, "K N"]) -> Float[np.ndarray, "K N"]:
    """`x` times a power of two, so that its largest magnitude is from 1/2 to 1.

    The number of right bits stays the same. Near the ends of FP32's range, a scale times a code
    would otherwise become infinite or zero.
    """
    _, exponent = np.frexp(np.max(np.abs(x), initial=0.0))
    return np.ldexp(x, -exponent)


def _simulated(fmt: AnyFormat) -> Minifloat:
    """A format that XLA simulates in products.

    E4M3 and E5M2 get another bias, which scales compensate. Their own dtypes would be multiplied in
    FP8, and no hardware multiplies E5M2 by E5M2.
    """
    if isinstance(fmt, IntegerFormat):
        return Minifloat(0, fmt.bits - 1)
    assert fmt.bias is not None
    return dataclasses.replace(fmt, bias=fmt.bias + 1) if fmt.name in DTYPES else fmt
