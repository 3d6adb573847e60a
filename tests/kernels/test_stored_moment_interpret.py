"""The kernels for moments of any optimizer in Triton's interpreter, against their references."""

import interpreted
import pytest
from stored_moment_cases import CASES, Case, StoredMomentLaws, check

pytestmark = interpreted.MARKS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_agree_with_their_references(case: Case) -> None:
    check(case)


class TestKernels(StoredMomentLaws):
    pass
