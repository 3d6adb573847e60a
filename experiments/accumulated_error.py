"""How far Adam's update is from exact after thousands of steps with moments stored in 8 bits.

    error = sum (u' - u)^2 / sum u^2,    u of optax's Adam in FP32, u' of the optimizer measured

    python -m experiments.accumulated_error                      twenty minutes on two CPU cores
    python -m experiments.accumulated_error --steps 50           smoke test

`optimizer_error` encodes exact moments once. Here each optimizer runs its own step on its own
stored moments, so that rounding errors accumulate as they do in training. All receive the
gradients of one training: a small Llama on real text under `optax.adamw` (FP32, b2 = 0.95).

Every element of every matrix counts, with Adam's own eps. The layers' matrices are reported apart
from embedding and head, whose rows belong to rare and common bytes. "Directions and logarithms" is
coat_jax's default storage, "dynamic range expansion" that of the COAT paper. Groups have 128
elements unless a name says otherwise; bitsandbytes itself has blocks of 256, and rounds to nearest.
Every format is measured with v rounded to nearest and stochastically, to separate the effects of
format and rounding. `leads` change one part of a format each, with v stochastic.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

import coat_jax as coat
from coat_jax.kernels.adam import Hyper
from coat_jax.numerics.expansion import GROUP_SIZE
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
        *(
            scale_by_stored_adam(Hyper(b2=b2), stored.coded(first, second))
            for first, second in (
                (plain, coders.plain_stochastic),
                (plain, lambda v, _: plain(v)),
                (signed, coders.dynamic_stochastic),
                (signed, lambda v, _: unsigned(v)),
            )
        ),
    ]


class Lead(NamedTuple):
    """A format with one part changed."""

    bytes: float  # of both moments, per parameter; of simulated codes, what they would need
    optimizer: optax.GradientTransformation


def leads(b2: float) -> dict[str, Lead]:
    """The optimizers that show what each part of a format contributes to its error, by name.

    "m alone" and "v alone": only this moment is stored in 8 bits, the other one in FP32.
    """
    hyper = Hyper(b2=b2)
    ours, expanded = Storage(), Storage(first=E4M3, second=E4M3)

    def native(storage: Storage) -> Lead:
        tx = coat.optax.scale_by_fp8_adam(b2=b2, storage=storage)
        return Lead(2 * in_8_bits(storage.group_size), tx)

    def tried(store: stored.Store, in_bytes: float = 2 * in_8_bits()) -> Lead:
        return Lead(in_bytes, scale_by_stored_adam(hyper, store))

    alone = in_8_bits() + 4
    k_in_fp32 = 2 * (1 + 8 / GROUP_SIZE)
    companded = 2 * (1 + 2 / stored.FLASH_OPTIM_GROUP)
    return {
        f"{OURS}, m alone": tried(stored.first_alone(ours, hyper), alone),
        f"{OURS}, v alone": tried(stored.second_alone(ours, hyper), alone),
        f"{OURS}, all of m stochastic": tried(stored.first_stochastic(ours, hyper)),
        f"{OURS}, groups of 64": native(Storage(group_size=64)),
        f"{OURS}, groups of 32": native(Storage(group_size=32)),
        "directions, v in expanded UE4M4": native(Storage(second="UE4M4")),
        f"{EXPANDED}, m alone": tried(stored.first_alone(expanded, hyper), alone),
        f"{EXPANDED}, v alone": tried(stored.second_alone(expanded, hyper), alone),
        f"{EXPANDED}, all of m stochastic": tried(stored.first_stochastic(expanded, hyper)),
        f"{EXPANDED}, small m never zero": tried(stored.first_never_zero(expanded, hyper)),
        f"{EXPANDED}, k in FP32": tried(stored.expanded_with_exponent(None), k_in_fp32),
        f"{EXPANDED}, sqrt(v) instead of v": tried(stored.root_of_second(expanded, hyper)),
        f"{EXPANDED}, v in UE4M4": native(Storage(first=E4M3, second="UE4M4")),
        "FlashOptim's codes, v to nearest": tried(stored.flash_optim(stochastic=False), companded),
        "FlashOptim's codes, v stochastic": tried(stored.flash_optim(stochastic=True), companded),
    }


def in_8_bits(group_size: int = GROUP_SIZE) -> float:
    """Bytes per parameter of one moment: a code, and a scale and an exponent for each group."""
    return 1 + 5 / group_size


def measure(steps: int, seed: int) -> Followed:
    """The errors by b2, storage and part."""
    training = optax.adamw(schedule(steps), b2=0.95, weight_decay=WEIGHT_DECAY)
    comparisons = {
        f"b2 = {b2}": Comparison(
            optax.scale_by_adam(b2=b2),
            dict(zip(STORAGES, storages(b2), strict=True))
            | {name: lead.optimizer for name, lead in leads(b2).items()},
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
    """Prints the errors at the end: a table of the formats, and one of the leads."""
    ends = figures["at the end"]
    lead_names = [name for name in next(iter(ends.values())) if name not in STORAGES]
    steps = figures["training"]["steps"]
    for title, names in (("Formats", STORAGES), ("Leads", lead_names)):
        table = Table(title=f"{title}: error of the update after {steps} steps")
        for column in ("b2", "moments stored as", *PARTS):
            table.add_column(column)
        for b2, of_b2 in ends.items():
            for name in names:
                table.add_row(b2, name, *(f"{of_b2[name][part]:.2e}" for part in PARTS))
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
