"""Vision-language models: docs/vision.md."""

from experiments.published.results import FOLDER, GB, bold, of
from experiments.vision_demo import KINDS
from experiments.vision_study import show
from experiments.vision_study.study import STUDY

SIGNIFICANT = 0.05
ARMS = {
    "`COAT_BF16_FORWARD`": "coat_bf16_forward",
    "`COAT_INT8`": "coat_int8",
    "`COAT`": "coat",
    "FP8 in the decoder alone": "decoder_alone",
}
TITLES = {
    "train": "training",
    "held_out": "held out",
    "style": "another style",
    "combinations": "new combinations",
}


def demo() -> list[list[str]]:
    """How often the models of the demo answer right."""
    rows = [["question", "BF16", "COAT", "McNemar's p"]]
    for one in of("vision_demo")["compared"]:
        shares = (f"{100 * right / one['questions']:.1f} %" for right in (one["bf16"], one["coat"]))
        rows.append([KINDS[one["kind"]], *shares, f"{one['p']:.2g}"])
    return rows


def speed() -> list[list[str]]:
    """A step of two models, by what is in FP8."""
    models = {"SmolVLM": "smolvlm_256m", "so400m": "so400m"}
    found = [of(f"vision_speed_{model}")["cases"] for model in models.values()]
    rows = [[""]]
    for name in models:
        rows[0] += [f"{name}, images/s", "peak, GB", "saved, GB"]
    for both in zip(*found, strict=True):
        if both[0]["way"] == "COAT, the tower's products in BF16":
            continue
        cells = []
        for case in both:
            saved = f"{case['saved'] / GB:.1f}" if "saved" in case else ""
            cells += [f"{case['images_per_second']:.0f}", f"{case['peak'] / GB:.1f}", saved]
        rows.append([both[0]["way"], *cells])
    return rows


def costs() -> list[list[str]]:
    """What FP8 costs in nats of an answer's token, by what is in FP8."""
    runs = STUDY.read([FOLDER / "vision_study.json"])
    found = {split: show.losses(runs, split) for split in TITLES}
    rows = [["nats above BF16", *TITLES.values()]]
    rows.append(["two BF16 runs apart", *(f"{found[split].noise.apart:.4f}" for split in TITLES)])
    for name, arm in ARMS.items():
        costs = (found[split].effects[arm] for split in TITLES)
        rows.append([name, *(bold(show.written(c), c.holm < SIGNIFICANT) for c in costs)])
    return rows


def exact() -> list[list[str]]:
    """How often answers are exact, and McNemar's p of no difference from BF16."""
    runs = STUDY.read([FOLDER / "vision_study.json"])
    rows = [["exact answers, % (p)", *[*TITLES.values()][1:]]]
    for name, arm in {"BF16": "bf16", "BF16, rounded otherwise": "bf16_ulp", **ARMS}.items():
        cells = []
        for split in [*TITLES][1:]:
            found = show.exact(runs, arm, split)
            p = "" if arm == "bf16" else f" ({found.p:.2g})"
            cells.append(f"{100 * found.share:.1f}{p}")
        rows.append([name, *cells])
    return rows
