"""The figures of docs/loss_study.md."""

from experiments.figures.compare import Given, Page, Sentence
from experiments.figures.measured import fine_tuning, loss_study
from experiments.figures.measured.loss_study import STUDY
from experiments.figures.pages.reasons import SETTING
from experiments.loss_study import statistics


def seeds_that_resolve(arm: str, *, muon: bool = False) -> int:
    """How many seeds of an arm resolve a difference of 0.1 %."""
    return statistics.seeds_for(0.001, loss_study.effects(*STUDY, muon=muon).effects[arm])


PAGE = Page(
    "docs/loss_study.md",
    [
        Given("cheapest measurement of 0.1 %", SETTING),
        Given("A difference of 0.1 % is resolved if its 95 % interval", SETTING),
        Given("is narrower than ± 0.1 %", SETTING),
        Sentence(
            "that differ only in rounding end {:.4f} % apart, and COAT's interval over {:d} seeds "
            "is ± {:.3f} %:",
            lambda: (
                fine_tuning.floor(),
                fine_tuning.effects().effects["coat"].seeds,
                fine_tuning.cost("coat")[1],
            ),
        ),
        Sentence(
            "This takes about {:.0f} minutes of one H200. It trains a model from each seed in BF16",
            lambda: (fine_tuning.minutes(seeds=3),),
        ),
        Sentence(
            "This takes about {:.0f} minutes of one H200. BF16 runs end {:.3f} % apart, but COAT's "
            "runs differ more between seeds: over {:d} seeds its interval is ± {:.2f} %, and {:d} "
            "seeds should be enough.",
            lambda: (
                loss_study.minutes("40M", steps=STUDY[-1], runs=12),
                100 * loss_study.effects(*STUDY, muon=True).noise.apart,
                loss_study.effects(*STUDY, muon=True).effects["muon_coat"].seeds,
                loss_study.cost("muon_coat", muon=True)[1],
                seeds_that_resolve("muon_coat", muon=True),
            ),
        ),
        Sentence(
            "With AdamW, BF16 runs end {:.3f} % apart and COAT's interval is ± {:.2f} % over {:d} "
            "seeds: it would take about {:d} seeds of `bf16 bf16_ulp coat`, or {:.0f} minutes.",
            lambda: (
                loss_study.floor(),
                loss_study.cost("coat")[1],
                loss_study.seeds("coat"),
                seeds_that_resolve("coat"),
                loss_study.minutes("40M", steps=STUDY[-1], runs=3 * seeds_that_resolve("coat")),
            ),
        ),
        Sentence(
            "COAT's runs differ less, and {:d} seeds should be enough.",
            lambda: (seeds_that_resolve("coat_after_bf16"),),
        ),
        Given("The last 8 MB", SETTING),
    ],
)
