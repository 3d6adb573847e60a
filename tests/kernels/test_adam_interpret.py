"""The AdamW kernel in Triton's interpreter, against its reference."""

import os

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")
from adam_cases import CASES, Case, check

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="Triton decides at import: run with TRITON_INTERPRET=1",
    ),
    # Logarithms of zero are meant.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_agrees_with_reference(case: Case) -> None:
    check(case)
