"""The command line of an experiment: its docstring, and where its results are.

Does not import JAX, which would take the memory of GPUs that workers need.
"""

import argparse
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def parser_of(docstring: str | None, *, draws: bool = False) -> argparse.ArgumentParser:
    """A parser that takes --out.

    Args:
        docstring: of the experiment, which --help shows as it is.
        draws: whether it also takes --draw, for a picture of results that are there.
    """
    parser = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for the results")
    if draws:
        parser.add_argument("--draw", action="store_true", help="only show the results of before")
    return parser
