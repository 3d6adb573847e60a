"""The picture of `optimizer_error`, drawn from the figures in its JSON file.

python -m experiments.moments.picture experiments/results/optimizer_error.json
"""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments import records
from experiments.command import bare_parser_of
from experiments.moments.errors import BOTTOMS, FORMATS, GRANULARITIES, GROUP_SIZES

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, RED, GREEN = "#2563a8", "#e07b24", "#c0392b", "#2e8b6f"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 22,
    "axes.grid": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "lines.marker": "o",
}

Figures = dict[str, Any]


def draw(figures: Figures, path: Path) -> None:
    """Draws eight panels and writes them as PNG."""
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(2, 4, figsize=(17.5, 8.2), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.18)
        for axis, panel in zip(axes.flat, PANELS, strict=True):
            panel(axis, figures)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)


def _title(axis: Axes, title: str, subtitle: str) -> None:
    axis.set_title(title)
    axis.text(0, 1.025, subtitle, transform=axis.transAxes, color=MUTED, fontsize=8.5)


def _heat_map(axis: Axes, figures: Figures) -> None:
    rows = figures["b2 = 0.95"]["layers"]
    unit, paper = "E4M3+E / E4M3+E", figures["paper"]

    def ratios(value: Any) -> np.ndarray:
        cells = [[value(f"{m} / {v}") / value(unit) for v in FORMATS] for m in FORMATS]
        return np.array(cells)

    measured = ratios(lambda name: rows[name]["error"])
    published = ratios(lambda name: paper[name])
    axis.imshow(np.log2(measured), cmap="Blues", vmin=-0.4, vmax=5.2, aspect="auto")
    for i, j in np.ndindex(measured.shape):
        color = "white" if measured[i, j] > 5 else INK
        is_unit = FORMATS[i] == FORMATS[j] == "E4M3+E"
        weight = "bold" if is_unit else "normal"
        axis.text(
            j, i - 0.08, f"{measured[i, j]:.2f}", ha="center", va="center", color=color,
            fontsize=12, weight=weight,
        )  # fmt: skip
        axis.text(
            j, i + 0.24, f"paper {published[i, j]:.2f}", ha="center", va="center", color=color,
            fontsize=7.5, alpha=0.8,
        )  # fmt: skip
        if is_unit:
            axis.add_patch(plt.Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, ec=BLUE, lw=2))
    axis.set_xticks(range(4), FORMATS)
    axis.set_yticks(range(4), FORMATS)
    axis.set_xlabel("second moment v")
    axis.set_ylabel("first moment m")
    axis.grid(visible=False)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    _title(
        axis, "Error of m/√v by format", "+E: with expansion; relative to both in E4M3+E (framed)"
    )


def _group_size(axis: Axes, figures: Figures) -> None:
    rows = figures["group size"]
    for kind, color in (("plain", ORANGE), ("expanded", BLUE)):
        errors = [rows[f"{kind} {s}"]["error"] / rows["expanded 128"]["error"] for s in GROUP_SIZES]
        axis.plot(GROUP_SIZES, errors, color=color)
        _name(axis, kind, (GROUP_SIZES[0], errors[0]), (0, -15), color)
    axis.set_xscale("log", base=2)
    axis.set_xticks(GROUP_SIZES, [f"{size}\n{10 / size:.2f} B" for size in GROUP_SIZES])
    axis.set_ylim(0, 3.2)
    axis.set_xlabel("group size; bytes of amax and k per parameter")
    axis.set_ylabel("relative error")
    _title(
        axis,
        "Small groups help only if expanded",
        "both in E4M3; relative to groups of 128, expanded",
    )


def _granularity(axis: Axes, figures: Figures) -> None:
    rows = figures["exponent"]["layers"]
    ratios = [rows[f"steps {s}"]["error"] / rows["ours"]["error"] for s in GRANULARITIES]
    places = range(len(GRANULARITIES))
    axis.plot(places, ratios, color=BLUE)
    for x, y in zip(places, ratios, strict=True):
        _name(axis, f"{y:.2f}", (x, y), (2, 7), INK)
    axis.set_xticks(places, ["1", "1/2", "1/4", "1/8", "1/16\n(coat_jax)", "FP32"])
    axis.set_xlim(-0.25, len(places) - 0.5)
    axis.set_ylim(0, 1.15 * max(ratios))
    axis.set_xlabel("k is rounded down to a multiple of")
    axis.set_ylabel("relative error")
    _title(axis, "One byte is enough for k", "expansion's exponent, at least 1")


def _range(axis: Axes, figures: Figures) -> None:
    rows = figures["range"]["layers"]
    last = len(BOTTOMS) - 1
    for moment, color in (("m", ORANGE), ("v", BLUE)):
        ratios = [rows[f"{moment} 2^-{b}"]["error"] / rows["ours"]["error"] for b in BOTTOMS]
        axis.plot(range(len(BOTTOMS)), ratios, color=color)
        _name(axis, f"{moment} alone", (last, ratios[-1]), (0, 8), color, ha="right")
    axis.axhline(1, color=MUTED, lw=1, marker="")
    labels = [f"$2^{{-{b}}}$" for b in BOTTOMS]
    labels[BOTTOMS.index(9)] += "\n(m)"
    labels[BOTTOMS.index(7)] += "\n(v)"
    axis.set_xticks(range(len(BOTTOMS)), labels)
    axis.set_ylim(0.8, 1.65)
    axis.set_xlabel("code for a group's smallest element; below: coat_jax")
    axis.set_ylabel("relative error")
    _title(axis, "How far to expand", "m: to the smallest code; v: not to the coarsest codes")


def _dead_neighbours(axis: Axes, figures: Figures) -> None:
    _dead(axis, figures, "neighbours")
    axis.legend(frameon=False, fontsize=8.5, loc="upper left")
    axis.set_ylim(2e-4, 1e-2)
    axis.set_ylabel("error of the other elements")
    _title(axis, "An element that decays, and its group", "a bound of 1 for k limits the harm")


def _dead_itself(axis: Axes, figures: Figures) -> None:
    _dead(axis, figures, "itself")
    axis.set_ylabel("error of its own update, as in Adam")
    _title(axis, "An element that decays, by itself", "plain FP8 divides by zero")


def _dead(axis: Axes, figures: Figures, whose: str) -> None:
    rows = figures["dead member"]
    for name, color, style, label in (
        ("plain", MUTED, "--", "plain FP8"),
        ("floor 1/16", RED, "-", "k \u2265 1/16 (the authors)"),
        ("floor 1/2", ORANGE, "-", "k \u2265 1/2 (coat_jax, v)"),
        ("floor 1", BLUE, "-", "k \u2265 1 (coat_jax, m)"),
    ):
        errors = [row[whose][name] for row in rows.values()]
        axis.plot([float(scale) for scale in rows], errors, style, color=color, label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.invert_xaxis()
    axis.set_xlabel("the element's gradients, times")


def _mean_of_v(axis: Axes, figures: Figures) -> None:
    drift = figures["drift"]["b2 = 0.999, half fall"]
    _over_steps(axis, drift["step"], drift["mean"])
    axis.plot(drift["step"], drift["mean"]["FP32"], ":", color=INK, marker="", label="FP32")
    axis.legend(frameon=False, fontsize=8.5, loc="lower left")
    axis.set_ylim(0.02, 2)
    axis.set_ylabel("mean of v over its expectation")
    _title(axis, "v, as half of it falls by $10^4$", "b2 = 0.999, gradients fall 100 times halfway")


def _error_of_u(axis: Axes, figures: Figures) -> None:
    drift = figures["drift"]["b2 = 0.999, half fall"]
    _over_steps(axis, drift["step"], drift["update_rms"])
    axis.set_ylim(0.03, 10)
    axis.set_ylabel("rms relative error of 1/\u221av")
    _title(axis, "The updates that result", "what rounding v does to the size of a step")


def _over_steps(axis: Axes, steps: list[int], curves: dict[str, list[float]]) -> None:
    for storage, color, label in (
        ("nearest", RED, "to nearest"),
        ("stochastic, 2^-9", GREEN, "stochastic, smallest at $2^{-9}$"),
        ("stochastic", BLUE, "stochastic, smallest at $2^{-7}$ (coat_jax)"),
    ):
        axis.plot(steps, curves[storage], color=color, marker="", label=label)
    axis.set_yscale("log")
    axis.set_xlabel("step")


def _name(
    axis: Axes,
    text: str,
    point: tuple[float, float],
    offset: tuple[int, int],
    color: str,
    *,
    ha: str = "left",
) -> None:
    axis.annotate(text, point, offset, textcoords="offset points", color=color, ha=ha, fontsize=8.5)


PANELS = (
    _heat_map,
    _group_size,
    _granularity,
    _range,
    _dead_neighbours,
    _dead_itself,
    _mean_of_v,
    _error_of_u,
)


if __name__ == "__main__":
    parser = bare_parser_of(__doc__)
    parser.add_argument("figures", type=Path, help="the JSON file; the picture goes beside it")
    source = parser.parse_args().figures
    draw(records.read(source), source.with_suffix(".png"))
