"""The pictures of docs/ideas.md: what the ideas of COAT do to numbers, computed by the package.

    python -m experiments.ideas          a minute on two CPU cores; writes docs/pictures
    python -m experiments.ideas --draw   draws again what is in the results file

    formats      the numbers that each 8-bit format has, and how it rounds
    expansion    one group of second moments, and the numbers that each format has for it
    direction    first moments of that group, as they are and over the root of the second moments
    decay        a second moment whose gradient has stopped, rounded in two ways
    layer        which arrays a Llama layer saves for its backward pass, and how large they are
    errors       the error of Adam's update by format, from accumulated_error.json

The group has 128 neighbours of a matrix in a small Llama after 64 steps: of all groups in its
layers the one with the median spread.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import coat_jax as coat
from experiments import records
from experiments.command import RESULTS, bare_parser_of
from experiments.layers import Sizes
from experiments.layers.in_jax import abstract_weights, forward_saving, operators
from experiments.moments import coders, recording

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
STEPS, B1, B2 = 64, 0.9, 0.95
GROUP = 128
LAYERS = {"BF16": coat.BF16, "COAT": coat.COAT, "COAT_LEAN": coat.COAT_LEAN}
ARRAYS = {  # that each operator saves, smallest first
    "attention_input": ("input of norm 1",),
    "attention": ("query", "key", "value", "output"),
    "mlp": ("input of norm 2", "gate", "up"),
}
SHORT = {"input of norm 1": "x", "input of norm 2": "x"}
SHORT |= {"query": "q", "key": "k", "value": "v", "output": "o"}
DECAY_B2, DECAY_STEPS = 0.999, 3000
NEAREST = coat.Storage(min_size=0, stochastic=False)

Figures = dict[str, Any]
Numbers = Float[np.ndarray, " N"]


def typical_group() -> tuple[Numbers, Numbers]:
    """Moments m and v of the group whose v has the median ratio of largest to smallest."""
    moments = recording.record(B2, STEPS, seed=0)[-1].layers()
    m, v = (np.asarray(x).reshape(-1, GROUP) for x in (moments.m, moments.v))
    whole = (v > 0).all(axis=1)
    m, v = m[whole], v[whole]
    middle = np.argsort(v.max(axis=1) / v.min(axis=1))[len(v) // 2]
    return m[middle], v[middle]


def measure_group(m: Numbers, v: Numbers) -> Figures:
    """The group, what each format has for it, and the errors of the three ways to store it."""
    direction = m / np.sqrt(v)
    plain, expanded = coders.plain(coat.E4M3), coders.expanded(coat.E4M3)
    stored = NEAREST.write_moments(jnp.asarray(m), jnp.asarray(v), jnp.uint32(0), B1, B2)
    ways = {
        "one scale": (plain(m), plain(v)),
        "expansion": (expanded(m), expanded(v)),
        "direction and logarithm": NEAREST.read_moments(*stored),
    }
    errors = {
        way: _size(np.asarray(m_ / jnp.sqrt(v_)) - direction) / _size(direction)
        for way, (m_, v_) in ways.items()
    }
    return {
        "m": m.tolist(),
        "v": v.tolist(),
        "binades": math.log2(v.max() / v.min()),
        "k": float(coat.expansion.encode(jnp.asarray(v)).exponent_x16[0]) / 16,
        "codes a binade of a logarithm": float(stored[1].exponent_x16[0]),
        "errors of m / sqrt(v)": errors,
    }


def _size(x: Numbers) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(x**2)))


def measure_decay() -> Figures:
    """v of an element without a gradient, beside neighbours whose gradients keep their v at 1."""
    grads = {"w": jnp.ones((1, GROUP)).at[0, 0].set(0.0)}
    curves: dict[str, list[float]] = {"exact": [DECAY_B2**step for step in range(DECAY_STEPS)]}
    for name, stochastic in (("stochastic", True), ("nearest", False)):
        storage = coat.Storage(min_size=0, stochastic=stochastic)
        tx = coat.optax.scale_by_fp8_adam(b2=DECAY_B2, storage=storage)
        start = tx.init({"w": jnp.ones((1, GROUP))})
        # Makes v = 1 everywhere.
        first = {"w": jnp.full((1, GROUP), 1 / math.sqrt(1 - DECAY_B2))}
        _, start = tx.update(first, start)

        def step(state: Any, _: None, tx: Any = tx, storage: Any = storage) -> Any:
            v = storage.read(coat.Expanded(*(part["w"] for part in state.nu)))
            return tx.update(grads, state)[1], v[0, 0]

        _, seen = jax.lax.scan(step, start, None, DECAY_STEPS)
        curves[name] = np.asarray(seen).tolist()
    return {name: curve[:: DECAY_STEPS // 150] for name, curve in curves.items()}


def measure_layers() -> Figures:
    """For each preset the arrays that a layer of Llama-2-7B saves: name, dtype, size in U."""
    return {name: _saved(precision) for name, precision in LAYERS.items()}


def _saved(precision: coat.Precision) -> list[dict[str, Any]]:
    sizes = Sizes()
    large = sizes.unit // 2  # elements of the input
    # In FP32, one for each row and head. XLA's attention, which is counted here, recomputes it.
    log_sum_exp = 4 * large // sizes.head
    found = []
    for part, names in ARRAYS.items():
        function, arrays = operators(sizes, precision)[part]
        saving = partial(forward_saving, function)
        _, saved = jax.eval_shape(saving, abstract_weights(sizes), *arrays)
        values = sorted((leaf for leaf in saved if leaf.size >= large), key=lambda leaf: leaf.size)
        total = sum(leaf.size for leaf in values)
        beside = sum(leaf.size * leaf.dtype.itemsize for leaf in saved if leaf.size < large)
        beside += log_sum_exp if part == "attention" else 0
        for name, leaf in zip(names, values, strict=True):
            size = leaf.size * leaf.dtype.itemsize + beside * leaf.size / total
            found.append({"name": name, "dtype": leaf.dtype.name, "units": size / sizes.unit})
    return found


# --- Pictures --------------------------------------------------------------------------------


def draw(figures: Figures) -> None:
    """Every picture."""
    ends = records.read(RESULTS / "accumulated_error.json")["at the end"]
    with plt.rc_context(records.CHART):
        for name, picture in {
            "formats": _draw_formats(),
            "expansion": _draw_expansion(figures["group"]),
            "direction": _draw_direction(figures["group"]),
            "decay": _draw_decay(figures["decay"]),
            "layer": _draw_layer(figures["layers"]),
            "errors": _draw_errors(ends),
        }.items():
            picture.savefig(PICTURES / f"{name}.png")


def fp8_values(dtype: Any) -> Numbers:
    """The positive numbers of an FP8 format."""
    values = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    values = np.asarray(values.astype(jnp.float32))
    return np.unique(values[np.isfinite(values) & (values > 0)])


def _rug(axes: Any, values: Numbers, height: float, color: str) -> None:
    axes.vlines(np.log2(values), height - 0.36, height + 0.36, color=color, lw=0.6)


def _draw_formats() -> Figure:
    rows = {
        "int8": np.arange(1, 128, dtype=np.float64),
        "E4M3": fp8_values(coat.E4M3),
        "E5M2": fp8_values(coat.E5M2),
        "logarithm": 2.0 ** (-np.arange(255) / 16),
    }
    colors = records.LINES
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.2), width_ratios=(1.25, 1))
    for place, (values, color) in enumerate(zip(rows.values(), colors, strict=False)):
        _rug(left, values / values.max(), -place, color)
    left.set_yticks([-place for place in range(len(rows))], list(rows))
    left.set_xlabel("binades below the largest number")
    left.set_title("Every positive number of each format")
    left.grid(False)
    x = 2.0 ** np.linspace(-24, 0, 4001)
    for (name, values), color in zip(rows.items(), colors, strict=False):
        codes = np.concatenate([[0.0], values / values.max()])
        nearest = codes[np.abs(x[:, None] - codes).argmin(axis=1)]
        error = np.abs(nearest / x - 1)
        windows = np.array_split(np.arange(len(x)), 96)
        right.plot(
            [np.log2(x[window].mean()) for window in windows],
            [100 * error[window].max() for window in windows],
            color=color,
            label=name,
        )
    right.set_yscale("log")
    right.set_yticks([1, 10, 100], ["1 %", "10 %", "100 %"])
    right.set_xlabel("binades below the largest number")
    right.set_title("Largest relative error of rounding to nearest")
    right.legend(fontsize=8)
    return figure


def _draw_expansion(group: Figures) -> Figure:
    v = np.array(group["v"])
    e4m3 = fp8_values(coat.E4M3)
    e4m3 = e4m3 / e4m3.max()
    k, steps = group["k"], group["codes a binade of a logarithm"]
    rows = {
        "E4M3 with one scale": e4m3,
        f"E4M3 with dynamic range expansion, k = {k:.2f}": e4m3 ** (1 / k),
        f"8-bit logarithm, {steps:.0f} codes a binade": 2.0 ** (-np.arange(255) / steps),
    }
    figure, axes = plt.subplots(4, 1, figsize=(8.6, 4.8), sharex=True, height_ratios=(2.4, 1, 1, 1))
    axes[0].hist(np.log2(v / v.max()), bins=36, color=records.ACCENT)
    axes[0].set_ylabel("elements")
    axes[0].set_title(f"A group of {len(v)} second moments")
    for axis, (name, values) in zip(axes[1:], rows.items(), strict=True):
        _rug(axis, values, 0, records.INK)
        axis.set_yticks([])
        axis.grid(False)
        axis.spines["left"].set_visible(False)
        axis.set_title(f"The numbers that it can be rounded to: {name}", fontsize=9, pad=4)
    axes[-1].set_xlim(-18.2, 0.3)
    axes[-1].set_xlabel("binades below the largest of the group")
    return figure


def _draw_direction(group: Figures) -> Figure:
    m, v = np.array(group["m"]), np.array(group["v"])
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.0), sharey=True)
    bins = np.linspace(-10, 0, 31)
    for axis, values, title in (
        (axes[0], np.abs(m), "First moments |m|"),
        (axes[1], np.abs(m) / np.sqrt(v), "Directions |m| / sqrt(v)"),
    ):
        axis.hist(np.maximum(np.log2(values / values.max()), -10), bins=bins, color=records.ACCENT)
        axis.set_title(title)
        axis.set_xlabel("binades below the largest of the group")
    axes[0].set_ylabel("elements")
    return figure


def _draw_decay(curves: Figures) -> Figure:
    figure, axes = plt.subplots(figsize=(8.6, 3.2))
    labels = {
        "exact": ("FP32", records.PALE, 5.0),
        "stochastic": ("8 bits, rounded stochastically", records.ACCENT, 1.4),
        "nearest": ("8 bits, rounded to nearest", records.INK, 1.4),
    }
    for name, (label, color, width) in labels.items():
        steps = np.arange(len(curves[name])) * (DECAY_STEPS // 150)
        axes.plot(steps, curves[name], label=label, color=color, lw=width)
    axes.set_xlabel("steps without a gradient")
    axes.set_ylabel("v")
    axes.set_ylim(0, 1.1)
    axes.set_title(f"A second moment that should decay, b2 = {DECAY_B2}")
    axes.legend(fontsize=9)
    return figure


def _draw_layer(layers: Figures) -> Figure:
    figure, axes = plt.subplots(figsize=(8.6, 2.8))
    for place, arrays in enumerate(layers.values()):
        left = 0.0
        for array in arrays:
            is_fp8 = array["dtype"].startswith("float8")
            color = records.ACCENT if is_fp8 else records.PALE
            axes.barh(-place, array["units"], left=left, color=color, edgecolor="white", height=0.7)
            label = SHORT.get(array["name"], array["name"])
            ink = "white" if is_fp8 else records.INK
            axes.text(left + array["units"] / 2, -place, label, ha="center", va="center", color=ink)
            left += array["units"]
        axes.text(left + 0.1, -place, f"{left:.1f} U", va="center")
    axes.set_yticks([-place for place in range(len(layers))], list(layers))
    axes.set_xlabel("U: the size of the layer's input in BF16")
    axes.set_title("What a Llama-2-7B layer saves for its backward pass: grey BF16, red FP8")
    axes.grid(axis="x")
    axes.grid(False, axis="y")
    return figure


def _draw_errors(ends_of: Figures) -> Figure:
    names = {
        "one scale per group, v stochastic": "E4M3, one scale",
        "dynamic range expansion, v stochastic": "E4M3, expanded",
        "directions and logarithms, v stochastic": "direction, logarithm",
    }
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 2.4), sharey=True)
    for axis, b2 in zip(axes, ends_of, strict=True):
        ends = ends_of[b2]
        values = [100 * math.sqrt(ends[name]["layers"]) for name in names]
        axis.barh(range(3), values, color=[records.PALE, records.PALE, records.ACCENT], height=0.6)
        for place, value in enumerate(values):
            axis.text(value, place, f" {value:.1f} %", va="center")
        axis.set_yticks(range(3), list(names.values()))
        axis.set_title(b2)
        axis.set_xlim(0, 1.2 * max(values))
        axis.grid(axis="x")
        axis.grid(False, axis="y")
    figure.suptitle("Error of Adam's update after 1500 steps on stored moments", fontsize=11)
    return figure


def main() -> None:
    """Measures, writes the results and draws."""
    parser = bare_parser_of(__doc__)
    parser.add_argument("--draw", action="store_true", help="draw the results that are there")
    options = parser.parse_args()
    path = RESULTS / "ideas.json"
    if not options.draw:
        group = measure_group(*typical_group())
        figures = {"group": group, "decay": measure_decay(), "layers": measure_layers()}
        records.write(path, figures)
    draw(records.read(path))


if __name__ == "__main__":
    main()
