"""What a module of tests in Triton's interpreter begins with; skips it where that is not there."""

import os

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

MARKS = [
    pytest.mark.interpret,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="Triton decides at import: run with TRITON_INTERPRET=1",
    ),
    # Logarithms of zero and exponentials of large numbers are meant.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]
