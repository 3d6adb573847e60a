"""What becomes of a worker that ends without results."""

import pytest

from experiments.workers import Ended, outcome

FULL = (
    "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 40.1GiB"
)
ADVICE = "For simplicity, JAX has removed its internal frames from the traceback."


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (Ended([{"ms": 1}, {"ms": 2}], 0, FULL), {"ms": 2}),
        (
            Ended([], 1, f"Traceback:\n{FULL}\n{ADVICE}"),
            {"failed": "out of memory", "error": FULL},
        ),
        (Ended([], 1, "Traceback:\nValueError: no"), {"failed": "ValueError: no"}),
        (Ended([], -9, ""), {"failed": "no message"}),
    ],
)
def test_the_outcome_is_the_last_result_or_the_error(ended, expected):
    assert outcome(ended) == expected
