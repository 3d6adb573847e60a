"""How far bounds of magnitudes are above the largest one in a trained model, and what that costs.

    looseness = log2(bound / largest magnitude)        one binade of FP8 unused for each 1

A layer on a GPU scales a norm's output, and the gradients of gate and up, by bounds of them instead
of the magnitudes that they have (`norm.bound_of_norm`, `activation.gradient_bounds`).

    python -m experiments.bound_looseness               three minutes on two CPU cores
    python -m experiments.bound_looseness --steps 8     smoke test

A small Llama learns real text, in FP32. Then every bound is compared with what it bounds, on
held-out text, in BF16 and with saved blocks rounded to nearest. The model hardly has outliers, so
they are also planted where the function stays the same: columns of the norm's scale are multiplied
by a factor, and the rows of the weights after it divided by it; or rows of down are multiplied, and
columns of up divided. Planted columns are drawn at random. The error of rounding to FP8, RMS over
RMS, is of all other columns, with the scale from the bound and with that from the largest
magnitude.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float
from rich.progress import track

from coat_jax.kernels import gemm
from coat_jax.kernels.activation import activate_backward, gradient_bounds
from coat_jax.kernels.norm import Norm, bound_of_norm, normalize, statistics
from coat_jax.numerics.blocks import from_blocks, to_blocks
from coat_jax.numerics.formats import E4M3, E5M2, format_of
from experiments import records
from experiments.command import parser_of
from experiments.recorded_layers import Recorded, Rows, record
from experiments.trained_llama import SEED

BLOCK = 16
COLUMNS, FACTORS = 3, (100, 1000)

Errors = dict[str, float]


class NormSite(NamedTuple):
    """A norm and its inputs."""

    x: Rows
    norm: Norm


class MLPSite(NamedTuple):
    """What the backward pass of an MLP starts from, and the weight of its last product."""

    gate: Rows
    up: Rows
    down: Float[Array, "F D"]
    dy: Rows


Site = NormSite | MLPSite


class Bounded(NamedTuple):
    """An array that is rounded to FP8, and a bound of its magnitudes."""

    values: Rows
    bound: Float[Array, ""]
    dtype: DTypeLike


def main() -> None:
    """Trains, measures, writes results and prints the errors in %."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    options = parser.parse_args()
    layers, training = record(options.steps)
    figures = measure([site for layer in layers for site in sites_of(layer)])
    records.write(options.out / "bound_looseness.json", {"training": training, "bounded": figures})
    for name, cases in figures.items():
        for case, found in cases.items():
            errors = (f"{key} {100 * found[key]:.3f} %" for key in found if "error" in key)
            print(f"{name}, {case}: looseness {found['looseness']:.1f},", ", ".join(errors))


def sites_of(recorded: Recorded) -> list[Site]:
    """Both norms and the MLP of a layer."""
    layer = recorded.layer
    x, y, gate, up, dy = (
        getattr(recorded, name).astype(jnp.bfloat16) for name in ("x", "y", "gate", "up", "dz")
    )
    norms = (layer.attention_norm, x), (layer.mlp_norm, y)
    return [
        *(NormSite(inputs, Norm(norm.scale[...], eps=1e-5)) for norm, inputs in norms),
        MLPSite(gate, up, layer.mlp.down.kernel[...], dy),
    ]


def measure(sites: Sequence[Site]) -> dict[str, dict[str, Errors]]:
    """By what is bounded and by outliers, the means over the sites."""
    random = np.random.default_rng(SEED)
    found: dict[str, dict[str, list[Errors]]] = {}
    for site in track(sites, "comparing"):
        width = (site.x if isinstance(site, NormSite) else site.up).shape[-1]
        hit = np.isin(np.arange(width), random.choice(width, COLUMNS, replace=False))
        place = "norm's scale" if isinstance(site, NormSite) else "down"
        cases = {"as trained": site}
        cases |= {f"{place} times {f}": with_outliers(site, hit, f) for f in FACTORS}
        for case, changed in cases.items():
            for name, of in bounded(changed).items():
                found.setdefault(name, {}).setdefault(case, []).append(compare(of, ~hit))
    return {
        name: {
            case: {key: float(np.mean([one[key] for one in of_sites])) for key in of_sites[0]}
            for case, of_sites in cases.items()
        }
        for name, cases in found.items()
    }


def with_outliers(site: Site, hit: Bool[np.ndarray, " D"], factor: float) -> Site:
    """The same function with `factor` times as large columns of a norm's scale, or rows of down."""
    times = jnp.where(hit, jnp.float32(factor), 1.0)
    match site:
        case NormSite():
            norm = dataclasses.replace(site.norm, scale=site.norm.scale * times)
            return site._replace(norm=norm)
        case MLPSite():
            up = (site.up / times).astype(site.up.dtype)
            return site._replace(up=up, down=site.down * times[:, None])


def bounded(site: Site) -> dict[str, Bounded]:
    """What a layer scales by a bound, as on a GPU."""
    match site:
        case NormSite():
            n = normalize(site.x, statistics(site.x, site.norm), site.norm)
            rounding = 2.0 ** -(format_of(E4M3).mantissa_bits + 1)
            bound = bound_of_norm(site.norm, site.x.shape[-1], rounding)
            return {"norm's output": Bounded(n, bound, E4M3)}
        case MLPSite():
            g, w = (
                gemm.scaled_with_lengths(
                    x, gemm.tensor_scale(gemm.largest_magnitude(x), dtype), dtype, "straight", "xla"
                )
                for x, dtype in ((site.dy, E5M2), (site.down.astype(jnp.bfloat16), E4M3))
            )
            da = gemm.product_transposed(g, w, jnp.bfloat16)
            saved = [to_blocks(h, size=BLOCK) for h in (site.gate, site.up)]
            values = activate_backward([from_blocks(b, size=BLOCK) for b in saved], da, "silu")
            bounds = gradient_bounds(saved, gemm.bound_of_product_transposed(g, w), "silu")
            names = ("gradient of gate", "gradient of up")
            return {
                name: Bounded(x, bound, E5M2)
                for name, x, bound in zip(names, values, bounds, strict=True)
            }


def compare(of: Bounded, others: Bool[np.ndarray, " D"]) -> Errors:
    """How loose a bound is, and what rounding does with either scale to the `others`.

    Raises if the bound is exceeded.
    """
    largest = gemm.largest_magnitude(of.values)
    if not largest <= of.bound:
        raise ValueError(f"The largest magnitude {largest} exceeds its bound {of.bound}.")
    found = {"looseness": float(jnp.log2(of.bound / largest))}
    values = of.values[:, others]
    for scaled_by, amax in (("bound", of.bound), ("largest", largest)):
        scale = gemm.tensor_scale(amax, of.dtype)
        codes = gemm.scaled(values, scale, of.dtype).values.astype(jnp.float32)
        error = jnp.linalg.norm(codes * scale - values) / jnp.linalg.norm(values)
        found[f"error, {scaled_by}"] = float(error)
    return found


if __name__ == "__main__":
    main()
