"""How far Adam's update is from exact after thousands of steps with moments stored in 8 bits.

    error = sum (u' - u)^2 / sum u^2,    u of optax's Adam in FP32, u' of the optimizer measured

    python -m experiments.accumulated_error                      six minutes on two CPU cores
    python -m experiments.accumulated_error --steps 50           smoke test

`optimizer_error` encodes exact moments once. Here each optimizer runs its own step on its own
stored moments, so that rounding errors accumulate as they do in training. All receive the
gradients of one training: a small Llama on real text under `optax.adamw` (FP32, b2 = 0.95).

Every element of every matrix counts, with Adam's own eps. The layers' matrices are reported apart
from embedding and head, whose rows belong to rare and common bytes. "Directions and logarithms" is
coat_jax's default storage, "dynamic range expansion" that of the COAT paper. Groups have 128
elements everywhere; bitsandbytes itself has blocks of 256, and rounds to nearest. Every format is
measured with v rounded to nearest and stochastically, to separate the effects of format and
rounding.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

import coat_jax as coat
from coat_jax.kernels.adam import Hyper, adam_update
from coat_jax.numerics import noise
from coat_jax.numerics.formats import E4M3
from coat_jax.storage import Storage
from experiments import records
from experiments.moments import coders
from experiments.moments.followed import (
    WEIGHT_DECAY,
    Comparison,
    Experiment,
    Followed,
    follow,
    schedule,
)

B2S = (0.95, 0.999)
PARTS = ("layers", "embedding and head")
FORMATS = OURS, EXPANDED, PLAIN, DYNAMIC = (
    "directions and logarithms",
    "dynamic range expansion",
    "one scale per group",
    "bitsandbytes' code",
)
ROUNDINGS = STOCHASTIC, NEAREST = "v stochastic", "v to nearest"
STORAGES = [f"{name}, {rounding}" for name in FORMATS for rounding in ROUNDINGS]

Figures = dict[str, Any]


def storages(b2: float) -> list[optax.GradientTransformation]:
    """The optimizers of `STORAGES`, in this order; each one's update is Adam's direction."""
    plain = coders.plain(E4M3)
    signed, unsigned = (coders.dynamic(signed=signed) for signed in (True, False))
    expanded = Storage(first=E4M3, second=E4M3)
    return [
        coat.optax.scale_by_fp8_adam(b2=b2),
        coat.optax.scale_by_fp8_adam(b2=b2, storage=Storage(stochastic=False)),
        coat.optax.scale_by_fp8_adam(b2=b2, storage=expanded),
        coat.optax.scale_by_fp8_adam(b2=b2, storage=coat.storage.PAPER),
        scale_by_coded_adam(b2, plain, coders.plain_stochastic),
        scale_by_coded_adam(b2, plain, lambda v, _: plain(v)),
        scale_by_coded_adam(b2, signed, coders.dynamic_stochastic),
        scale_by_coded_adam(b2, signed, lambda v, _: unsigned(v)),
    ]


class CodedState(NamedTuple):
    """Both moments after encoding and decoding, in FP32."""

    count: Array
    mu: Any
    nu: Any


def scale_by_coded_adam(
    b2: float, first: coders.Coder, second: Callable[[Array, Array], Array]
) -> optax.GradientTransformation:
    """Adam whose moments are encoded and decoded after every step.

    Args:
        b2: decay rate of the second moment.
        first: the coder of the first moment.
        second: the coder of the second, which also takes a number in [0, 1) for each element.
    """
    hyper = Hyper(b2=b2)

    def init(params: Any) -> CodedState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return CodedState(jnp.zeros([], jnp.int32), zeros, zeros)

    def update(grads: Any, state: CodedState, params: Any = None) -> tuple[Any, CodedState]:
        del params
        count = state.count + 1
        flat, tree = jax.tree.flatten(grads)
        old = zip(flat, jax.tree.leaves(state.mu), jax.tree.leaves(state.nu), strict=True)
        mu, nu, updates = [], [], []
        for leaf, (grad, *before) in enumerate(old):
            m, v, direction = adam_update(*before, grad, count, hyper, nesterov=False)
            uniform = noise.uniform(noise.leaf_key(0, count, leaf), v.shape, run=coders.GROUP_SIZE)
            updates.append(direction)
            mu.append(first(m))
            nu.append(second(v, uniform))
        return tree.unflatten(updates), CodedState(count, tree.unflatten(mu), tree.unflatten(nu))

    return optax.GradientTransformation(init, update)


def measure(steps: int, seed: int) -> Followed:
    """The errors by b2, storage and part."""
    training = optax.adamw(schedule(steps), b2=0.95, weight_decay=WEIGHT_DECAY)
    comparisons = {
        f"b2 = {b2}": Comparison(
            optax.scale_by_adam(b2=b2), dict(zip(STORAGES, storages(b2), strict=True))
        )
        for b2 in B2S
    }
    return follow(training, comparisons, matrices, steps=steps, seed=seed)


def matrices(tree: Any) -> dict[str, dict[str, Array]]:
    """The leaves that coat_jax stores in FP8, by part and path."""
    parts: dict[str, dict[str, Array]] = {part: {} for part in PARTS}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        if Storage().quantizes(leaf.shape):
            parts[PARTS[0] if "layers" in name else PARTS[1]][name] = leaf
    return parts


def main() -> None:
    """Measures, prints the table and writes figures and picture."""
    Experiment(__doc__, "accumulated_error", measure, draw, show).run(steps=1500)


def show(figures: Figures) -> None:
    """Prints the errors at the end."""
    table = Table(title=f"Error of the update after {figures['training']['steps']} steps")
    for column in ("b2", "moments stored as", *PARTS):
        table.add_column(column)
    for b2, of_b2 in figures["at the end"].items():
        for name, parts in of_b2.items():
            table.add_row(b2, name, *(f"{parts[part]:.2e}" for part in PARTS))
    Console().print(table)


def draw(figures: Figures, path: Path) -> None:
    """Draws the error over training, a panel for each b2 and part."""
    import matplotlib.pyplot as plt

    colors = dict(zip(FORMATS, (records.ACCENT, "#7a5195", records.INK, "#2563a8"), strict=True))
    lines = dict(zip(ROUNDINGS, ("-", ":"), strict=True))
    styles = {
        f"{name}, {rounding}": {"color": color, "ls": line}
        for name, color in colors.items()
        for rounding, line in lines.items()
    }
    with plt.rc_context(records.CHART):
        figure, panels = plt.subplots(1, 4, figsize=(15, 3.9), layout="constrained")
        places = [(b2, part) for part in PARTS for b2 in figures["error"]]
        for axes, (b2, part) in zip(panels, places, strict=True):
            for name, style in styles.items():
                axes.plot(figures["step"], figures["error"][b2][name][part], label=name, **style)
            axes.set_yscale("log")
            axes.set_title(f"{part}, {b2}")
            axes.set_xlabel("step")
        panels[0].set_ylabel("squared error of the update, relative")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(path)


if __name__ == "__main__":
    main()
