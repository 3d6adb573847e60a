"""How far Adam's update is from exact after thousands of steps with moments stored in 8 bits.

    error = sum (u' - u)^2 / sum u^2,    u of optax's Adam in FP32, u' of the optimizer measured

    python -m experiments.accumulated_error                      twenty minutes on two CPU cores
    python -m experiments.accumulated_error --steps 50           smoke test

`moments.once` encodes exact moments once. Here each optimizer runs its own step on its own
stored moments, so that rounding errors accumulate as they do in training. All receive the
gradients of one training: a small Llama on real text under `optax.adamw` (FP32, b2 = 0.95).

Every element of every matrix counts, with Adam's own eps. The layers' matrices are reported apart
from embedding and head, whose rows belong to rare and common bytes. "Directions and logarithms" is
coat_jax's default storage, "dynamic range expansion" that of the COAT paper. Groups have 128
elements unless a name says otherwise; bitsandbytes itself has blocks of 256, and rounds to nearest.
Every format is measured with v rounded to nearest and stochastically, to separate the effects of
format and rounding. The results also have variations of dynamic range expansion that commit
12e08a75 tried.
"""

from pathlib import Path
from typing import Any

import jax
import optax
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

import coat_jax as coat
from coat_jax.kernels.adam import Hyper
from coat_jax.numerics.formats import E4M3
from coat_jax.storage import Storage
from experiments import records
from experiments.moments import coders, stored
from experiments.moments.followed import (
    WEIGHT_DECAY,
    Comparison,
    Experiment,
    Followed,
    follow,
    schedule,
)
from experiments.moments.stored import scale_by_stored_adam

B2S = (0.95, 0.999)
PARTS = ("layers", "embedding and head")
FORMATS = OURS, EXPANDED, PLAIN, DYNAMIC = (
    "directions and logarithms",
    "dynamic range expansion",
    "one scale per group",
    "bitsandbytes' code",
)
ROUNDINGS = STOCHASTIC, NEAREST = "v stochastic", "v to nearest"

Figures = dict[str, Any]


def storages(b2: float) -> dict[str, optax.GradientTransformation]:
    """Optimizers by the name of what they store; each one's update is Adam's direction.

    "m alone" and "v alone": only this moment is stored in 8 bits, the other one in FP32.
    """
    plain, hyper = coders.plain(E4M3), Hyper(b2=b2)
    signed, unsigned = (coders.dynamic(signed=signed) for signed in (True, False))

    def native(**changes: Any) -> optax.GradientTransformation:
        return coat.optax.scale_by_fp8_adam(b2=b2, storage=Storage(**changes))

    def tried(store: stored.Store) -> optax.GradientTransformation:
        return scale_by_stored_adam(hyper, store)

    return {
        f"{OURS}, {STOCHASTIC}": native(),
        f"{OURS}, {NEAREST}": native(stochastic=False),
        f"{OURS}, m alone": tried(stored.first_alone(Storage(), hyper)),
        f"{OURS}, v alone": tried(stored.second_alone(Storage(), hyper)),
        f"{OURS}, groups of 64": native(group_size=64),
        f"{OURS}, groups of 32": native(group_size=32),
        f"{EXPANDED}, {STOCHASTIC}": native(first=E4M3, second=E4M3),
        f"{EXPANDED}, {NEAREST}": native(first=E4M3, second=E4M3, stochastic=False),
        f"{PLAIN}, {STOCHASTIC}": tried(stored.coded(plain, coders.plain_stochastic)),
        f"{PLAIN}, {NEAREST}": tried(stored.coded(plain, lambda v, _: plain(v))),
        f"{DYNAMIC}, {STOCHASTIC}": tried(stored.coded(signed, coders.dynamic_stochastic)),
        f"{DYNAMIC}, {NEAREST}": tried(stored.coded(signed, lambda v, _: unsigned(v))),
        f"FlashOptim's codes, {STOCHASTIC}": tried(stored.flash_optim(stochastic=True)),
        f"FlashOptim's codes, {NEAREST}": tried(stored.flash_optim(stochastic=False)),
    }


def measure(steps: int, seed: int) -> Followed:
    """The errors by b2, storage and part."""
    training = optax.adamw(schedule(steps), b2=0.95, weight_decay=WEIGHT_DECAY)
    comparisons = {f"b2 = {b2}": Comparison(optax.scale_by_adam(b2=b2), storages(b2)) for b2 in B2S}
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
    steps = figures["training"]["steps"]
    table = Table(title=f"Error of the update after {steps} steps")
    for column in ("b2", "moments stored as", *PARTS):
        table.add_column(column)
    for b2, of_b2 in figures["at the end"].items():
        for name, errors in of_b2.items():
            table.add_row(b2, name, *(f"{errors[part]:.2e}" for part in PARTS))
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
