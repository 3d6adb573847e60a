"""By how much `compress` changes the loss of each optimizer of optax: compress_table.json."""

from collections.abc import Iterable

from experiments.published.results import of

DTYPES = ("float32", "bfloat16")
BANDS = {0.01: "at most 1 %", 0.03: "1 to 3 %", 0.06: "3 to 6 %"}


def ratios(*names: str) -> list[float]:
    """The loss with compress over that without, for each dtype in which it does not diverge."""
    losses = [of("compress_table")["trained"][name][dtype] for name in names for dtype in DTYPES]
    return [one["compressed_loss"] / one["loss"] for one in losses if one["loss"] is not None]


def changes() -> list[list[str]]:
    """The transformations by the larger change of their loss, in FP32 or BF16."""
    trained = of("compress_table")["trained"]
    rows = [["change of the loss", "transformations"]]
    rows.append(["none: stores no moments", _code(n for n in trained if not _leaves(n))])
    change = {name: max(abs(r - 1) for r in ratios(name)) for name in trained if _leaves(name)}
    low = -1.0
    for high, words in BANDS.items():
        rows.append([words, _code(name for name in change if low < change[name] <= high)])
        low = high
    for name in (name for name in change if change[name] > low):
        times = ratios(name)
        rows.append([f"{min(times):.1f} to {max(times):.1f} times as large", _code([name])])
    return rows


def _leaves(name: str) -> int:
    return of("compress_table")["trained"][name]["compressed_leaves"]


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
