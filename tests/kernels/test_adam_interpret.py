"""The AdamW kernel in Triton's interpreter, against its reference."""

import interpreted
import pytest
from adam_cases import CASES, Case, check
from adam_laws import KernelLaws

pytestmark = interpreted.MARKS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_agrees_with_reference(case: Case) -> None:
    check(case)


class TestKernels(KernelLaws):
    pass
