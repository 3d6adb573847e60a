"""How far bounds of magnitudes are above the largest one in a trained model, and what that costs.

    looseness = log2(bound / largest magnitude)        one binade of FP8 unused for each 1

A layer on a GPU scales a norm's output, and the gradients of gate and up, by bounds of them instead
of the magnitudes that they have (`norm.bound_of_norm`, `activation.gradient_bounds`).

    python -m experiments.bound_looseness               three minutes on two CPU cores
    python -m experiments.bound_looseness --steps 8     smoke test

A small Llama learns real text, in FP32. Then every bound is compared with what it bounds, on
held-out text, in BF16 and with saved blocks rounded to nearest. The model hardly has outliers, so
they are also planted where the function stays the same:

    norm's scale     columns times a factor, the rows of the weights after it divided by it
    up               columns times a factor, rows of down divided by it
    down             the reverse

Planted columns are drawn at random. The error of rounding to FP8, RMS over RMS, and the share of
values whose codes are subnormal or zero ("small") are of all other columns, with the scale from the
bound and with that from the largest magnitude.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float
from rich.console import Console
from rich.progress import track
from rich.table import Table

from coat_jax.kernels import gemm
from coat_jax.kernels.activation import activate_backward, gradient_bounds
from coat_jax.kernels.norm import Norm, bound_of_norm, normalize, statistics
from coat_jax.numerics.blocks import from_blocks, to_blocks
from coat_jax.numerics.formats import E4M3, E5M2, format_of
from experiments import records
from experiments.command import parser_of
from experiments.small_llama import Llama, loss
from experiments.trained_llama import CONFIG, RECORDED, SEED, SEQUENCE, train

BLOCK = 16
COLUMNS, FACTORS = 3, (100, 1000)
PLACES = {"norm": ("norm's scale",), "MLP": ("up", "down")}
AS_TRAINED = "as trained"

Rows = Float[Array, "T D"]


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


def record(steps: int) -> tuple[list[Site], dict[str, Any]]:
    """Trains, then records all norms and MLPs on a batch of held-out text."""
    model, tokens, losses, digest = train(steps)
    probes = [jnp.zeros((RECORDED, SEQUENCE, CONFIG.width))] * CONFIG.layers
    walk = nnx.jit(nnx.grad(_walk, argnums=1, has_aux=True))
    gradients, (value, taken) = walk(model, probes, tokens)
    np.testing.assert_allclose(value, loss(model, tokens), rtol=1e-5)  # it is the same model
    sites: list[Site] = []
    for layer, inputs, gradient in zip(model.layers, taken, gradients, strict=True):
        x, y, gate, up, dy = (
            a.reshape(-1, a.shape[-1]).astype(jnp.bfloat16) for a in (*inputs, gradient)
        )
        norms = (layer.attention_norm, x), (layer.mlp_norm, y)
        sites += [NormSite(inputs, Norm(norm.scale[...], eps=1e-5)) for norm, inputs in norms]
        sites.append(MLPSite(gate, up, layer.mlp.down.kernel[...], dy))
    losses |= {"held out": float(value)}
    return sites, {"steps": steps, "loss": losses, "corpus": digest}


def _walk(model: Llama, probes: Sequence[Array], tokens: Array) -> Any:
    """The loss and the inputs; `probes` are zeros whose gradients are those of each MLP."""
    x = model.embed(tokens[:, :-1])
    taken = []
    for layer, probe in zip(model.layers, probes, strict=True):
        before = x
        x = before + layer.attention(layer.attention_norm(before))
        n = layer.mlp_norm(x)
        gate, up = layer.mlp.gate(n), layer.mlp.up(n)
        taken.append((before, x, gate, up))
        x = x + layer.mlp.down(nnx.silu(gate) * up) + probe
    logits = model.head(model.norm(x))
    value = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return value, (value, taken)


# --- measuring -------------------------------------------------------------------------------


def with_outliers(site: Site, place: str, hit: Bool[np.ndarray, " D"], factor: float) -> Site:
    """The same function with `factor` times as large columns; see PLACES and above."""
    times = jnp.where(hit, jnp.float32(factor), 1.0)
    match site:
        case NormSite():
            norm = dataclasses.replace(site.norm, scale=site.norm.scale * times)
            return site._replace(norm=norm)
        case MLPSite():
            times = 1 / times if place == "down" else times
            up = (site.up * times).astype(site.up.dtype)
            return site._replace(up=up, down=site.down / times[:, None])


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


def compare(of: Bounded, others: Bool[np.ndarray, " D"]) -> dict[str, float]:
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
        small = jnp.abs(codes) < 2.0 ** format_of(of.dtype).min_exponent
        found[f"small, {scaled_by}"] = float(jnp.mean(small, where=values != 0))
        error = jnp.linalg.norm(codes * scale - values) / jnp.linalg.norm(values)
        found[f"error, {scaled_by}"] = float(error)
    return found


def measure(sites: Sequence[Site]) -> dict[str, dict[str, dict[str, float]]]:
    """By what is bounded and by outliers: the loosest bound, and the means over the sites."""
    random = np.random.default_rng(SEED)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for site in track(sites, "comparing"):
        width = (site.x if isinstance(site, NormSite) else site.up).shape[-1]
        hit = np.isin(np.arange(width), random.choice(width, COLUMNS, replace=False))
        cases = {AS_TRAINED: site}
        for place in PLACES["norm" if isinstance(site, NormSite) else "MLP"]:
            for factor in FACTORS:
                cases[f"{place} times {factor}"] = with_outliers(site, place, hit, factor)
        for case, changed in cases.items():
            for name, of in bounded(changed).items():
                found.setdefault(name, {}).setdefault(case, []).append(compare(of, ~hit))
    return {
        name: {case: _pooled(of_sites) for case, of_sites in cases.items()}
        for name, cases in found.items()
    }


def _pooled(of_sites: Sequence[dict[str, float]]) -> dict[str, float]:
    loosest = max(one["looseness"] for one in of_sites)
    means = {key: float(np.mean([one[key] for one in of_sites])) for key in of_sites[0]}
    return {"loosest": loosest, **means}


def main() -> None:
    """Trains, measures, writes results and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    options = parser.parse_args()
    started = time.perf_counter()
    sites, training = record(options.steps)
    figures: dict[str, Any] = {"training": training, "bounded": measure(sites)}
    figures["seconds"] = round(time.perf_counter() - started)
    records.write(options.out / "bound_looseness.json", figures)
    show(figures)


def show(figures: dict[str, Any]) -> None:
    """Prints shares and errors in %."""
    table = Table("bounded", "outliers", "loosest", "looseness", "small", "exact", "error", "exact")
    for name, cases in figures["bounded"].items():
        for case, found in cases.items():
            loose = (f"{found[key]:.1f}" for key in ("loosest", "looseness"))
            rest = (
                f"{100 * found[f'{key}, {scaled_by}']:.3f}"
                for key in ("small", "error")
                for scaled_by in ("bound", "largest")
            )
            table.add_row(name, case, *loose, *rest)
    Console().print(table)


if __name__ == "__main__":
    main()
