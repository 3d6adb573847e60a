"""How finely the saved inputs of non-linear layers must be scaled: per tensor, token or group.

Claim (the paper's figure 4a): norms and activations need one scale per 1 x 16 neighbours of the
hidden axis, and scales that tokens share hurt, above all at a norm's input.

    python -m experiments.granularity               four minutes on two CPU cores
    python -m experiments.granularity --steps 8     smoke test

A small Llama learns real text. The inputs of the norms and MLPs of three layers, and the gradients
of their outputs, are recorded on held-out text. Errors are RMS over RMS, against FP32, of these
inputs and of what the backward pass computes from them. In large models a few channels are tens to
hundreds of times larger than the rest; here they are not. SYNTHETIC cases therefore multiply the
three largest channels by a factor, in every token or in each sequence's first, and show the error
of the other channels.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from rich.console import Console
from rich.progress import track
from rich.table import Table

from coat_jax.kernels.activation import activate, activate_backward
from coat_jax.kernels.norm import Norm, normalize, normalize_backward, statistics
from coat_jax.numerics import blocks, qtensor
from coat_jax.numerics.formats import E4M3, E5M2
from experiments import records
from experiments.command import parser_of
from experiments.small_llama import Llama, loss
from experiments.trained_llama import CONFIG, RECORDED, SEQUENCE, train

LAYERS = {"first": 0, "middle": 2, "last": 4}
CHANNELS, FACTORS = 3, (1, 10, 100, 1000, 10000)
PLACES = {"every token": 1, "each sequence's first token": SEQUENCE}  # one of this many tokens

Rows = Float[Array, "T D"]
Stored = tuple[Rows, tuple[Array, ...]]  # the values it stands for, and the arrays it is
Coder = Callable[[Rows, int], Stored]  # with groups of a size
Keep = Callable[[Rows], Stored]


class Site(NamedTuple):
    """A non-linear layer: its inputs, and what its backward pass computes from them."""

    inputs: tuple[Rows, ...]
    backward: Callable[..., dict[str, Array]]


def _norm_backward(norm: Norm, dn: Rows, x: Rows) -> dict[str, Array]:
    stats = statistics(x, norm)
    dx, _ = normalize_backward(x, stats, norm, dn)
    return {"x": x, "n": normalize(x, stats, norm), "dx": dx}


def _mlp_backward(da: Rows, gate: Rows, up: Rows) -> dict[str, Array]:
    dgate, dup = activate_backward((gate, up), da, "silu")
    return {"gate": gate, "up": up, "a": activate((gate, up), "silu"), "dgate": dgate, "dup": dup}


def record(steps: int) -> tuple[dict[str, Site], dict[str, Any]]:
    """Trains, then records the layers on a batch of held-out text."""
    model, tokens, losses, digest = train(steps)
    narrow, wide = (jnp.zeros((RECORDED, SEQUENCE, d)) for d in (CONFIG.width, CONFIG.ffn))
    walk = nnx.jit(nnx.grad(_walk, argnums=1, has_aux=True))
    gradients, (value, taken) = walk(model, [(narrow, narrow, wide)] * CONFIG.layers, tokens)
    np.testing.assert_allclose(value, loss(model, tokens), rtol=1e-5)  # it is the same model
    sites = {}
    for name, i in LAYERS.items():
        x, y, gate, up, dn, dm, da = (t.reshape(-1, t.shape[-1]) for t in taken[i] + gradients[i])
        layer = model.layers[i]
        of_x, of_y = (Norm(n.scale[...], eps=1e-5) for n in (layer.attention_norm, layer.mlp_norm))
        sites[f"{name}, attention's norm"] = Site((x,), partial(_norm_backward, of_x, dn))
        sites[f"{name}, MLP's norm"] = Site((y,), partial(_norm_backward, of_y, dm))
        sites[f"{name}, MLP"] = Site((gate, up), partial(_mlp_backward, da))
    sizes = {"width": CONFIG.width, "ffn": CONFIG.ffn, "tokens": RECORDED * SEQUENCE}
    losses |= {"held out": float(value)}
    return sites, {"steps": steps, "loss": losses, "corpus": digest} | sizes


def _walk(model: Llama, probes: Any, tokens: Array) -> Any:
    """The loss and the inputs; `probes` are zeros whose gradients are those of n, n and a."""
    x = model.embed(tokens[:, :-1])
    taken = []
    for layer, (first, second, third) in zip(model.layers, probes, strict=True):
        before = x
        x = before + layer.attention(layer.attention_norm(before) + first)
        n = layer.mlp_norm(x) + second
        gate, up = layer.mlp.gate(n), layer.mlp.up(n)
        taken.append((before, x, gate, up))
        x = x + layer.mlp.down(nnx.silu(gate) * up + third)
    logits = model.head(model.norm(x))
    value = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return value, (value, taken)


# --- granularities ---------------------------------------------------------------------------


def _fp8(x: Rows, size: int, dtype: DTypeLike = E4M3) -> Stored:
    q = qtensor.quantize(x, dtype, group_size=size)
    return qtensor.dequantize(q), (q.codes, q.scale)


def _int8(x: Rows, size: int) -> Stored:
    grouped = qtensor.split_groups(x, size)
    scale = qtensor.group_max(jnp.abs(grouped))[..., None] / 127
    codes = jnp.round(grouped / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
    return qtensor.join_groups(codes * scale, x.shape), (codes, scale)


def _power_of_two(x: Rows, size: int) -> Stored:
    kept = blocks.to_blocks(x, E4M3, size=size)
    return blocks.from_blocks(kept, size=size), tuple(kept)


@partial(jax.jit, static_argnums=(0, 1))
def _stored(code: Coder, over: str | int, x: Rows) -> Stored:
    """`x` with one scale per tensor, token, channel or `over` neighbours."""
    if over == "channel":
        values, arrays = code(x.T, x.shape[0])
        return values.T, arrays
    if over == "tensor":
        values, arrays = code(x.reshape(1, -1), x.size)
        return values.reshape(x.shape), arrays
    return code(x, x.shape[-1] if over == "token" else int(over))


_e5m2 = partial(_fp8, dtype=E5M2)
OURS = "1 x 16, 2^n (ours)"
GRANULARITIES: dict[str, tuple[Coder, str | int]] = {
    "1 x 1, 2^n": (_power_of_two, 1),  # each value has its own exponent: none underflows
    OURS: (_power_of_two, 16),
    **{f"1 x {size}": (_fp8, size) for size in (16, 32, 64, 128)},
    **{f"per {over}": (_fp8, over) for over in ("token", "channel", "tensor")},
    "1 x 16, E5M2": (_e5m2, 16),
    "per tensor, E5M2": (_e5m2, "tensor"),
    "1 x 16, INT8": (_int8, 16),
    "per token, INT8": (_int8, "token"),
    "per tensor, INT8": (_int8, "tensor"),
}


# --- measuring -------------------------------------------------------------------------------


def measure(sites: dict[str, Site]) -> dict[str, Any]:
    """Errors by granularity: of what was recorded, and of norms with outliers."""
    recorded: dict[str, Any] = {}
    outliers: dict[str, Any] = {place: {str(f): {} for f in FACTORS} for place in PLACES}
    norms = {name: site for name, site in sites.items() if "norm" in name}
    (x,) = norms["last, MLP's norm"].inputs
    for name, kind in track(GRANULARITIES.items(), "coding"):
        keep = partial(_stored, *kind)
        errors = {place: _errors(keep, site) for place, site in sites.items()}
        size = sum(array.nbytes for array in keep(x)[1]) / x.size
        recorded[name] = {"bytes": size, "errors": _pooled(errors), "by site": errors}
        for place, factors in outliers.items():
            for factor in FACTORS:
                errors = {n: _outlier_errors(keep, s, factor, place) for n, s in norms.items()}
                factors[str(factor)][name] = _pooled(errors)
    channels = {name: jnp.sqrt(jnp.mean(n.inputs[0] ** 2, axis=0)) for name, n in norms.items()}
    ratios = {name: float(jnp.max(c) / jnp.median(c)) for name, c in channels.items()}
    return {"largest over median channel": ratios, "recorded": recorded, "outliers": outliers}


def _outlier_errors(keep: Keep, norm: Site, factor: int, place: str) -> dict[str, float]:
    """Errors of all but the largest channels, which are multiplied by `factor`."""
    (x,) = norm.inputs
    largest = jnp.argsort(jnp.mean(x**2, axis=0))[-CHANNELS:]
    hit = jnp.zeros(x.shape, bool).at[:: PLACES[place], largest].set(True)
    return _errors(keep, norm._replace(inputs=(jnp.where(hit, factor * x, x),)), ~hit)


def _errors(keep: Keep, site: Site, where: Array | None = None) -> dict[str, float]:
    exact = site.backward(*site.inputs)
    ours = site.backward(*(keep(x)[0] for x in site.inputs))
    return {name: _rms(ours[name] - y, where) / _rms(y, where) for name, y in exact.items()}


def _pooled(sites: dict[str, dict[str, float]]) -> dict[str, float]:
    """The root mean square over the sites that have an error of that name."""
    names = {name: None for errors in sites.values() for name in errors}
    found = {name: [e[name] for e in sites.values() if name in e] for name in names}
    return {name: _rms(jnp.array(errors)) for name, errors in found.items()}


def _rms(x: Array, where: Array | None = None) -> float:
    return float(jnp.sqrt(jnp.mean(x**2, where=where)))


# --- showing ---------------------------------------------------------------------------------


def main() -> None:
    """Trains, measures, writes results and picture and prints the tables."""
    parser = parser_of(__doc__, draws=True)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    options = parser.parse_args()
    if not options.draw:
        start = time.perf_counter()
        sites, training = record(options.steps)
        figures = {"training": training} | measure(sites)
        figures["seconds"] = round(time.perf_counter() - start)
        records.write(options.out / "granularity.json", figures)
    figures = records.read(options.out / "granularity.json")
    print_tables(figures)
    draw(figures, options.out / "granularity.png")


def print_tables(figures: dict[str, Any]) -> None:
    """Prints errors in %."""
    recorded, console = figures["recorded"], Console()
    table = Table("E4M3, or", "bytes", *recorded[OURS]["errors"], title="As recorded: error in %")
    for name, row in recorded.items():
        errors = (f"{100 * e:.2f}" for e in row["errors"].values())
        table.add_row(name, f"{row['bytes']:.3f}", *errors)
    console.print(table)
    for place, factors in figures["outliers"].items():
        shown = [("n", f) for f in factors] + [("x", "100"), ("dx", "100")]
        table = Table(
            "times", *(f"{y} {f}" for y, f in shown),
            title=f"SYNTHETIC: {CHANNELS} channels larger, in {place}; error of the others in %",
        )  # fmt: skip
        for name in recorded:
            table.add_row(name, *(f"{100 * factors[f][name][y]:.2f}" for y, f in shown))
        console.print(table)


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draws the errors of n and a as recorded, and that of n by the outliers' factor."""
    import matplotlib.pyplot as plt

    recorded = figures["recorded"]
    places = np.arange(len(recorded))
    parts = (("n", -0.2, records.ACCENT, "a norm's n"), ("a", 0.2, records.PALE, "an MLP's a"))
    with plt.rc_context(records.CHART):
        figure, (left, *others) = plt.subplots(1, 3, figsize=(15, 5), width_ratios=(1.2, 1, 1))
        for y, shift, color, label in parts:
            errors = [100 * row["errors"][y] for row in recorded.values()]
            bars = left.barh(places + shift, errors, 0.38, color=color, label=label)
            left.bar_label(bars, fmt="%.1f", padding=3, fontsize=7)
        left.set_yticks(places, recorded, fontsize=8)
        left.invert_yaxis()
        left.grid(visible=False)
        left.set_title("As recorded: error in %")
        left.legend(fontsize=8)
        formats = {"E5M2": "#4c78a8", "INT8": "#9aa5b1"}
        styles = {"1 x 16": "-", "per token": "--", "per channel": "-.", "per tensor": ":"}
        for axes, (place, factors) in zip(others, figures["outliers"].items(), strict=True):
            for name in (OURS, *(n for n in recorded if n.split(",")[0] in styles and n != OURS)):
                look: dict[str, Any] = {"color": records.INK, "lw": 4, "alpha": 0.3}
                if name != OURS:
                    over, _, dtype = name.partition(", ")
                    look = {"color": formats.get(dtype, records.ACCENT), "ls": styles[over]}
                errors = [100 * factors[f][name]["n"] for f in factors]
                axes.loglog([int(f) for f in factors], errors, label=name, **look)
            axes.set(xlabel="times larger", ylabel="error of the others in n, %")
            axes.set_title(f"Synthetic: {CHANNELS} channels larger,\nin {place}")
        others[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
        figure.savefig(path)


if __name__ == "__main__":
    main()
