"""Models that see: docs/vision.md."""

from experiments.published.results import of
from experiments.vision_demo import KINDS


def demo() -> list[list[str]]:
    """How often the models of the demo answer right."""
    rows = [["question", "BF16", "COAT", "McNemar's p"]]
    for one in of("vision_demo")["compared"]:
        shares = (f"{100 * right / one['questions']:.1f} %" for right in (one["bf16"], one["coat"]))
        rows.append([KINDS[one["kind"]], *shares, f"{one['p']:.2g}"])
    return rows


def saved() -> list[list[str]]:
    """What SmolVLM-256M saves for its backward pass, by the parts that are in FP8."""
    saved = of("vision_memory")
    rows = [["", "saved, MB", "less than BF16, times"]]
    for name, count in saved.items():
        rows.append([name, f"{count / 1e6:.0f}", f"{saved['BF16'] / count:.2f}"])
    return rows
