"""How many bits each format gets right, and what quantizing a trained network costs."""

from experiments.after_training import changes
from experiments.after_training.changes import What
from experiments.after_training.study import STUDY
from experiments.published.results import FOLDER, bold, of
from experiments.study.statistics import Cost

FORMATS = ["INT8", "E2M5", "E3M4", "E4M3", "E5M2"]
QUANTIZED = {"int8": "INT8", "fp8": "FP8"}
FITS = {"mse": "least error", "max": "largest magnitude", "percentile": "99.9 % of magnitudes"}
ACTIVATIONS = {"none": "in BF16", "dynamic": "a scale for each token", "static": "one scale"}


def bits() -> list[list[str]]:
    """The bits that are right in each format, by theory; the best of a row bold."""
    rows = [["numbers", *FORMATS]]
    for name, by_format in of("format_sqnr")["bits"].items():
        found = [by_format[fmt]["theory"] for fmt in FORMATS]
        rows.append([name, *(bold(f"{b:.2f}", b == max(found)) for b in found)])
    return rows


def quantized() -> list[list[str]]:
    """The cost of every recipe for the smaller network, trained in BF16."""
    columns = [(form, fit) for form in QUANTIZED for fit in FITS]
    of_runs = [r for r in STUDY.read([FOLDER / "after_training.json"]) if r["size"] == "40M"]
    costs = changes.costs(of_runs)["bf16"]
    rows = [["activations", *(f"{QUANTIZED[form]}, {FITS[fit]}" for form, fit in columns)]]
    for mode, words in ACTIVATIONS.items():
        recipes = (What(f"{form} {fit} {mode}") for form, fit in columns)
        rows.append([words, *(_cell(costs[what]) for what in recipes)])
    return rows


def _cell(effect: Cost) -> str:
    return f"{100 * effect.mean:+.3f} ± {100 * effect.half:.3f}"
