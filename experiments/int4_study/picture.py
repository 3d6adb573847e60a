"""The increase of the loss in each way, beside the bytes that a parameter takes."""

from pathlib import Path

from experiments import records
from experiments.int4_study.increases import by_arm, mean_increase, ways_of
from experiments.row_files import Row

BYTES = {"W8": "1 byte", "W4": "0.52 bytes", "FireQ": "0.51 bytes"}  # by how a way's name begins


def draw(title: str, rows: list[Row], path: Path) -> None:
    """A bar for each way and arm, the ways in their order from above."""
    import matplotlib.pyplot as plt

    kinds, arms = ways_of(rows)[::-1], by_arm(rows)
    height = 0.8 / len(arms)
    with plt.rc_context(records.CHART | {"axes.grid.axis": "x"}):
        figure, axes = plt.subplots(figsize=(8.5, 0.5 * len(kinds) + 1.2))
        colors = records.PALE, records.ACCENT, *records.LINES
        for i, ((arm, of_arm), color) in enumerate(zip(arms.items(), colors, strict=False)):
            found = [mean_increase(of_arm, way) for way in kinds]
            places = [place + 0.4 - (i + 0.5) * height for place in range(len(kinds))]
            axes.barh(
                places,
                [cost.mean for cost in found],
                height,
                xerr=[cost.half for cost in found],
                color=color,
                error_kw={"lw": 0.8, "ecolor": records.INK},
                label=arm,
            )
        axes.set_yticks(range(len(kinds)), [f"{way}, {_bytes(way)}" for way in kinds])
        axes.set_xlabel("increase of the held-out loss, nats a token")
        axes.set_title(title)
        axes.legend(title="trained in")
        figure.savefig(path)
        plt.close(figure)


def _bytes(way: str) -> str:
    return next(size for begin, size in BYTES.items() if way.startswith(begin))
