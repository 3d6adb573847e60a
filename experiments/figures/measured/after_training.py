"""What quantization costs a network after training: after_training."""

import functools

from experiments.after_training import changes, show
from experiments.after_training.changes import What
from experiments.figures.measured.files import FOLDER
from experiments.figures.measured.loss_study import cell, percent
from experiments.loss_study import results
from experiments.loss_study.statistics import Effect
from experiments.row_files import Row

MODEL, LARGER = "40M", "124M"
FORMATS = {"int8": "INT8", "fp8": "FP8"}
TRAINED = {"bf16": "BF16", "products": "FP8_LINEAR", "coat": "COAT"}
FURTHER = {
    "": "none",
    "bf16": "in BF16",
    "int8": "in INT8, one scale per tensor",
    "fp8": "in FP8, one scale per tensor",
}
FITS = {"max": "largest magnitude", "percentile": "99.9 % of magnitudes", "mse": "least error"}
ACTIVATIONS = {"none": "in BF16", "dynamic": "a scale for each token", "static": "one scale"}


def runs(size: str = MODEL) -> list[Row]:
    """All runs of a model."""
    return [row for row in results.read([FOLDER / show.FILE]) if row["size"] == size]


@functools.cache
def costs(size: str = MODEL) -> dict[str, dict[What, Effect]]:
    """The cost of each thing that was measured, by the arm that was trained."""
    return changes.costs(runs(size))


@functools.cache
def excesses(size: str = MODEL) -> dict[str, dict[What, Effect]]:
    """By how much these costs exceed those of networks that were trained in BF16."""
    return changes.excesses(runs(size))


def cost(
    recipe: str, arm: str = "bf16", further: str = "", size: str = MODEL
) -> tuple[float, float]:
    """What a recipe costs in held-out loss, and half of its interval, in percent."""
    return percent(costs(size)[arm][What(recipe, further)], digits=3)


def excess(recipe: str, arm: str = "coat", size: str = MODEL) -> tuple[float, float]:
    """By how much a recipe's cost exceeds that for a network trained in BF16."""
    return percent(excesses(size)[arm][What(recipe)], digits=3)


def least_p(size: str = MODEL) -> float:
    """The least p-value of all excesses, corrected for their number."""
    return min(effect.holm for of_arm in excesses(size).values() for effect in of_arm.values())


def by_recipe() -> list[list[str]]:
    """The cost of every recipe, by how the network was trained."""
    columns = _columns()
    rows = [["activations", "ranges", *(title for _, _, title in columns)]]
    for mode, in_words in ACTIVATIONS.items():
        for fit, of_range in FITS.items():
            cells = [
                cell(costs()[arm][What(f"{form} {fit} {mode}")], 3) for form, arm, _ in columns
            ]
            rows.append([in_words, of_range, *cells])
    return rows


def by_further_training() -> list[list[str]]:
    """The cost with a scale for each token, by what was trained before quantizing, and how."""
    columns = _columns()
    rows = [["parameters", "further steps", *(title for _, _, title in columns)]]
    for size in (MODEL, LARGER):
        for further, in_words in FURTHER.items():
            cells = [
                cell(costs(size)[arm][What(f"{form} mse dynamic", further)], 3)
                for form, arm, _ in columns
            ]
            rows.append([size, in_words, *cells])
    return rows


def _columns() -> list[tuple[str, str, str]]:
    """The columns of a table: format, arm and title."""
    return [
        (form, arm, f"{name}, trained in {how}")
        for form, name in FORMATS.items()
        for arm, how in TRAINED.items()
    ]
