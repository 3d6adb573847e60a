"""Tables of the study: losses above the baselines', and exact answers with McNemar's test."""

import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.row_files import Row
from experiments.study import statistics
from experiments.study.statistics import Comparison, Effect
from experiments.vision_study.arms import BASELINES
from experiments.vision_study.icons import KINDS, SPLITS

REFERENCE = BASELINES[0]


class Exact(NamedTuple):
    """The exact answers of an arm to all questions of a split, over its seeds."""

    share: float
    questions: int
    only_arm: int  # questions that the arm answers and the reference does not
    only_reference: int

    @property
    def p(self) -> float:
        """McNemar's: of no difference between both."""
        from scipy import stats

        both = self.only_arm + self.only_reference
        return float(stats.binomtest(self.only_arm, both).pvalue) if both else 1.0


def losses(rows: list[Row], split: str) -> Comparison:
    """What each arm costs in nats per token of held-out answers, or of training for "train"."""

    def loss(row: Row) -> float:
        nats = statistics.final(row) if split == "train" else np.mean(row["held_out"][split])
        return math.exp(nats)  # `compare` takes logs

    return statistics.compare(rows, BASELINES, loss)


def written(cost: Effect) -> str:
    """A cost in nats, and half of its interval."""
    half = "" if math.isnan(cost.half) else f" ± {cost.half:.4f}"
    return f"{cost.mean:+.4f}{half}"


def exact(rows: list[Row], arm: str, split: str, kinds: tuple[str, ...] = KINDS) -> Exact:
    """Compares an arm's answers with the reference's, seed by seed."""
    by_arm: dict[str, dict[int, str]] = defaultdict(dict)
    for row in rows:
        by_arm[row["arm"]][row["seed"]] = "".join(row["right"][split][kind] for kind in kinds)
    own, theirs = by_arm[arm], by_arm[REFERENCE]
    seeds = sorted(own.keys() & theirs.keys()) or sorted(own)
    mine = np.array([list(own[seed]) for seed in seeds]) == "1"
    other = np.array([list(theirs.get(seed, own[seed])) for seed in seeds]) == "1"
    return Exact(
        float(mine.mean()), mine.size, int((mine & ~other).sum()), int((other & ~mine).sum())
    )


def show(rows: list[Row], folder: Path | None) -> None:
    """Prints a table for each size and settings."""
    del folder
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[f"{row['size']}, {row['settings']}"].append(row)
    for name, group in groups.items():
        shown = Table(title=name)
        for column in ("arm", "seeds", *(f"loss, {split}" for split in SPLITS)):
            shown.add_column(column)
        for split in SPLITS[1:]:
            shown.add_column(f"exact, {split} (p)")
        effects = {split: losses(group, split).effects for split in SPLITS}
        for arm in dict.fromkeys(row["arm"] for row in group):
            costs = (effects[split].get(arm) for split in SPLITS)
            cells = [written(cost) if cost else "" for cost in costs]
            for split in SPLITS[1:]:
                found = exact(group, arm, split)
                cells.append(f"{100 * found.share:.1f} % ({found.p:.2g})")
            shown.add_row(arm, str(sum(row["arm"] == arm for row in group)), *cells)
        Console().print(shown)
