"""The two runs of a Llama of 124 million parameters: training_curves."""

from experiments.figures.measured.files import of


def tokens() -> float:
    """How many each run reads."""
    settings = of("training_curves")["settings"]
    return settings["steps"] * settings["batch"] * settings["sequence"]


def epochs() -> float:
    """How often each run sees its text."""
    return tokens() / of("training_curves")["settings"]["tokens of text"]


def held_out() -> tuple[float, float]:
    """The last held-out losses, in BF16 and in COAT."""
    base, ours = (curve["held out"] for curve in of("training_curves")["curves"].values())
    last = max(base, key=int)
    return base[last], ours[last]
