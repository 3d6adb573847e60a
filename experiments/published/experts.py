"""Mixtures of experts: docs/experts.md."""

from experiments.published.results import GB, of


def gigabytes(precision: str) -> str:
    """What a step of OLMoE takes of one GPU."""
    return f"{of('experts_memory')[precision]['peak'] / GB:.0f}"
