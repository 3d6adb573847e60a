"""The kernels for moments of any optimizer on a GPU, against their references."""

import jax
import pytest

pytest.importorskip("jax_triton")
from stored_moment_cases import CASES, Case, StoredMomentLaws, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]

LARGE = [
    Case("2^22 elements", (2048, 2048)),
    Case("2^22 elements, bfloat16", (2048, 2048), dtype="bfloat16"),
    Case("large and uneven", (1111, 1300)),
]


@pytest.mark.parametrize("case", CASES + LARGE, ids=lambda case: case.name)
def test_kernels_agree_with_their_references(case: Case) -> None:
    check(case)


class TestKernels(StoredMomentLaws):
    pass
