"""The kernels for experts in Triton's interpreter, against their references."""

import interpreted
from grouped_laws import GroupedLaws

pytestmark = interpreted.MARKS


class TestKernels(GroupedLaws):
    pass
