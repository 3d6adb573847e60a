"""The group of moments that docs/ideas.md shows: ideas.json."""

from experiments.published.results import of


def group(digits: str, *name: str) -> str:
    """A property of the group."""
    return f"{of('ideas')['group'][' '.join(name)]:.{digits}f}"


def error(*storage: str) -> str:
    """The error of the group's update after one rounding of its moments, in percent."""
    return f"{100 * of('ideas')['group']['errors of m / sqrt(v)'][' '.join(storage)]:.1f}"
