"""The kernel of INT4 weights in Triton's interpreter, against its reference."""

import interpreted
from int4_laws import Int4Laws

pytestmark = interpreted.MARKS


class TestKernel(Int4Laws):
    pass
