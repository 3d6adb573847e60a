"""How many bits of a number are right in each 8-bit format, by the distribution of the numbers.

Claim: integers suit uniform data; the heavier the tails, the more exponent bits pay off.

    python -m experiments.format_sqnr                two minutes on two CPU cores
    python -m experiments.format_sqnr --samples 14   smoke test: tensors of 2^14 numbers

Theory is an integral over the interval of numbers that each code stands for,

    error = sum over codes c of  integral (x - c)^2 p(x) dx,     bits = log2(x^2 / error) / 2

by Gauss-Legendre quadrature, at the range with the least error. It is compared with
`coat.quantizer` on random numbers, at the same range. These are drawn evenly over binades and
weighted by p(x), because a few of the largest would decide the result of plain samples with heavy
tails. The results also have tensors of plain samples, at the range that the quantizer's search
finds and at that up to their maximum. One bit is 6.02 dB.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from coat_jax.numerics.minifloat import Minifloat
from coat_jax.numerics.quantizer import Quantizer, format_named, sqnr_bits
from experiments import records
from experiments.command import parser_of

FORMATS = (
    "INT8", "E1M6", "E2M5", "E3M4", "E4M3:none", "E4M3", "E5M2:none", "E5M2", "E6M1", "E7M0",
)  # fmt: skip
NODES, WEIGHTS = np.polynomial.legendre.leggauss(24)
TAIL_OCTAVES = 60
OCTAVES, STEPS = np.arange(-3, 12), 48  # the search: of the range over the standard deviation
SEED, SAMPLES = 0, 20  # tensors of 2^20 numbers
WEIGHTED, BINADES = 2**22, (-16, 24)  # numbers that are weighted, and the binades they are from


class Distribution(NamedTuple):
    """Symmetric around zero.

    Attributes:
        density: of magnitudes, per side.
        variance: the mean square.
        sample: numbers, from a generator and how many.
        end: the largest magnitude.
    """

    density: Callable[[Float[np.ndarray, " n"]], Float[np.ndarray, " n"]]
    variance: float
    sample: Callable[[np.random.Generator, int], Float[np.ndarray, " n"]]
    end: float = np.inf


def normal(deviation: float = 1.0) -> Distribution:
    """The normal distribution."""
    return Distribution(
        lambda x: np.exp(-0.5 * (x / deviation) ** 2) / (deviation * np.sqrt(2 * np.pi)),
        deviation**2,
        lambda rng, n: rng.normal(0, deviation, n),
    )


def student(freedom: int) -> Distribution:
    """Student's t; `freedom` is even, for which the constant is a product of few numbers."""
    terms = [(freedom - 1 - 2 * i) / (freedom - 2 - 2 * i) for i in range(freedom // 2 - 1)]
    constant = np.prod(terms) / (2 * np.sqrt(freedom))
    return Distribution(
        lambda x: constant * (1 + x**2 / freedom) ** (-(freedom + 1) / 2),
        freedom / (freedom - 2),
        lambda rng, n: rng.standard_t(freedom, n),
    )


def with_outliers(share: float, times: float) -> Distribution:
    """Normal numbers, of which a share is `times` times larger."""
    few, many = normal(times), normal()
    return Distribution(
        lambda x: share * few.density(x) + (1 - share) * many.density(x),
        share * few.variance + (1 - share) * many.variance,
        lambda rng, n: rng.normal(0, np.where(rng.random(n) < share, times, 1.0)),
    )


DISTRIBUTIONS = {
    "uniform": Distribution(
        lambda x: np.where(x <= 1, 0.5, 0.0), 1 / 3, lambda rng, n: rng.uniform(-1, 1, n), end=1.0
    ),
    "normal": normal(),
    "Laplace": Distribution(
        lambda x: 0.5 * np.exp(-x), 2.0, lambda rng, n: rng.laplace(size=n)
    ),
    "Student t, 6 degrees": student(6),
    "Student t, 4 degrees": student(4),
    "normal, 1 % ten times larger": with_outliers(0.01, 10),
    "normal, 0.1 % a hundred times larger": with_outliers(0.001, 100),
}  # fmt: skip


# --- theory ----------------------------------------------------------------------------------


@functools.cache
def codes_of(fmt: Minifloat) -> Float[np.ndarray, " n"]:
    """The codes from zero up, as shares of the range."""
    return fmt.magnitudes[fmt.magnitudes <= fmt.full_scale] / fmt.full_scale


def theory(fmt: Minifloat, of: Distribution, limit: float) -> float:
    """The bits that are right if codes cover numbers up to `limit`, and larger ones saturate."""
    codes = limit * codes_of(fmt)
    middles = (codes[1:] + codes[:-1]) / 2
    tail = limit * 2.0 ** np.arange(1, TAIL_OCTAVES)
    low = np.concatenate([[0.0], middles, [limit], tail[:-1]])
    high = np.concatenate([middles, [limit], tail])
    near = np.concatenate([codes, np.full(len(tail), limit)])
    low, high = np.minimum(low, of.end)[:, None], np.minimum(high, of.end)[:, None]
    x = (high + low) / 2 + (high - low) / 2 * NODES
    per_interval = np.sum(WEIGHTS * (x - near[:, None]) ** 2 * of.density(x), axis=-1)
    error = 2 * np.sum((high - low)[:, 0] / 2 * per_interval)
    return float(0.5 * np.log2(of.variance / error))


def best_range(fmt: Minifloat, of: Distribution) -> tuple[float, float]:
    """The range with the least error, and its bits."""
    deviation = np.sqrt(of.variance)
    coarse = deviation * 2.0 ** np.arange(OCTAVES[0], OCTAVES[-1], 1 / STEPS)
    first = max(coarse, key=lambda limit: theory(fmt, of, limit))
    fine = first * 2.0 ** np.linspace(-1 / STEPS, 1 / STEPS, 65)
    limit = max(fine, key=lambda limit: theory(fmt, of, limit))
    return float(limit), theory(fmt, of, limit)


# --- measurement -----------------------------------------------------------------------------


def measure(samples: int) -> dict[str, Any]:
    """Theory and samples, of all distributions and formats."""
    table: dict[str, Any] = {}
    for name, of in DISTRIBUTIONS.items():
        rng = np.random.default_rng(SEED)
        x = jnp.asarray(of.sample(rng, samples), jnp.float32)
        spread = np.float32(2.0 ** rng.uniform(*BINADES, WEIGHTED))
        spread = np.minimum(spread, of.end) * rng.choice(np.float32([-1, 1]), WEIGHTED)
        table[name] = {f: _row(format_named(f), of, x, spread) for f in FORMATS}
    return {"samples": samples, "weighted samples": WEIGHTED, "bits": table}


def _row(
    fmt: Minifloat, of: Distribution, x: jax.Array, spread: Float[np.ndarray, " n"]
) -> dict[str, float]:
    """A format on a distribution: theory, weighted samples, and a tensor of plain ones."""
    limit, bits = best_range(fmt, of)
    plain, searching = Quantizer(fmt), Quantizer(fmt, fit="mse")
    known = jnp.array([limit])
    weights = of.density(np.abs(spread)) * np.abs(spread)
    weights[np.abs(spread) == of.end] = 0  # numbers beyond the end
    errors = np.asarray(jax.jit(plain.quantize)(spread, known), np.float64) - spread
    squares = np.average(np.float64(spread) ** 2, weights=weights)
    return {
        "theory": bits,
        "range over deviation": limit / np.sqrt(of.variance),
        "sampled": float(0.5 * np.log2(squares / np.average(errors**2, weights=weights))),
        "tensor": float(sqnr_bits(x, jax.jit(searching)(x))),
        "tensor at its maximum": float(sqnr_bits(x, jax.jit(plain)(x))),
    }


# --- showing ---------------------------------------------------------------------------------


def main() -> None:
    """Computes, measures, and writes results and picture."""
    parser = parser_of(__doc__, draws=True)
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, metavar="N", help="2^N in a tensor (%(default)s)"
    )
    options = parser.parse_args()
    if not options.draw:
        records.write(options.out / "format_sqnr.json", measure(2**options.samples))
    figures = records.read(options.out / "format_sqnr.json")
    draw(figures, options.out / "format_sqnr.png")


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draws a line for each distribution over the formats of 8 bits; dots are samples."""
    import matplotlib.pyplot as plt

    shown = [name for name in FORMATS if name not in ("E1M6", "E4M3", "E5M2")]
    with plt.rc_context(records.CHART):
        figure, axes = plt.subplots(figsize=(8.5, 5))
        colors = plt.get_cmap("viridis")(np.linspace(0.0, 0.92, len(figures["bits"])))
        for color, (name, rows) in zip(colors, figures["bits"].items(), strict=True):
            bits = [rows[f]["theory"] for f in shown]
            axes.plot(bits, color=color, lw=1.6, label=name)
            axes.plot([rows[f]["sampled"] for f in shown], "o", color=color, ms=3.5)
            best = int(np.argmax(bits))
            axes.plot(best, bits[best], "o", ms=11, mfc="none", mec=color, mew=1.6)
        axes.set_xticks(range(len(shown)), [name.split(":")[0] for name in shown])
        axes.set_ylabel("bits that are right")
        axes.set_title("Eight bits, by what is stored in them")
        said = "lines: theory, dots: samples, rings: the best"
        axes.legend(fontsize=8, title=said, title_fontsize=8)
        figure.savefig(path)


if __name__ == "__main__":
    main()
