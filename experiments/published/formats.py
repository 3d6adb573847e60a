"""How many bits each format gets right, and what quantizing a trained network costs."""

import functools

from experiments.after_training import changes
from experiments.after_training.changes import What
from experiments.after_training.study import STUDY
from experiments.published.results import FOLDER, bold, of
from experiments.study.statistics import Cost

FORMATS = ["INT8", "E2M5", "E3M4", "E4M3", "E5M2"]
QUANTIZED = {"int8": "INT8", "fp8": "FP8"}
FITS = {"mse": "least error", "max": "largest magnitude", "percentile": "99.9 % of magnitudes"}
ACTIVATIONS = {"none": "in BF16", "dynamic": "a scale for each token", "static": "one scale"}
FURTHER = {
    "": "none",
    "bf16": "in BF16",
    "int8": "in INT8, one scale per tensor",
    "fp8": "in FP8, one scale per tensor",
}
SIZES = ("40M", "124M")


def bits() -> list[list[str]]:
    """The bits that are right in each format, by theory; the best of a row bold."""
    rows = [["numbers", *FORMATS]]
    for name, by_format in of("format_sqnr")["bits"].items():
        found = [by_format[fmt]["theory"] for fmt in FORMATS]
        rows.append([name, *(bold(f"{b:.2f}", b == max(found)) for b in found)])
    return rows


@functools.cache
def costs(size: str) -> dict[str, dict[What, Cost]]:
    """The cost of each way of quantizing a network of this size, by how it was trained."""
    rows = STUDY.read([FOLDER / "after_training.json"])
    return changes.costs([row for row in rows if row["size"] == size])


def quantized() -> list[list[str]]:
    """The cost of every recipe for the smaller network, trained in BF16."""
    columns = [(form, fit) for form in QUANTIZED for fit in FITS]
    rows = [["activations", *(f"{QUANTIZED[form]}, {FITS[fit]}" for form, fit in columns)]]
    for mode, words in ACTIVATIONS.items():
        recipes = (What(f"{form} {fit} {mode}") for form, fit in columns)
        rows.append([words, *(_cell(costs("40M")["bf16"][what]) for what in recipes)])
    return rows


def tuned() -> list[list[str]]:
    """The cost with a scale for each token, after further steps of networks trained in BF16."""
    columns = [(form, size) for form in QUANTIZED for size in SIZES]
    rows = [["further steps", *(f"{QUANTIZED[form]}, {size}" for form, size in columns)]]
    for further, words in FURTHER.items():
        effects = (
            costs(size)["bf16"][What(f"{form} mse dynamic", further)] for form, size in columns
        )
        rows.append([words, *map(_cell, effects)])
    return rows


def _cell(effect: Cost) -> str:
    return f"{100 * effect.mean:+.3f} ± {100 * effect.half:.3f}"
