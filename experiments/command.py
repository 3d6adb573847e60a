"""The command line of an experiment: its docstring, and where its results are.

Does not import JAX, which would take the memory of GPUs that workers need.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"


def parser_of(docstring: str | None, *, draws: bool = False) -> argparse.ArgumentParser:
    """A parser that takes --out.

    Args:
        docstring: of the experiment, which --help shows as it is.
        draws: whether it also takes --draw, for a picture of results that are there.
    """
    parser = bare_parser_of(docstring)
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for the results")
    if draws:
        parser.add_argument("--draw", action="store_true", help="only show earlier results")
    return parser


def bare_parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """A parser without options, which names its program as it was called."""
    return argparse.ArgumentParser(
        prog=_called(), description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _called() -> str | None:
    """`python -m module`, if it was called so; else None, for argparse's own choice."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else None
