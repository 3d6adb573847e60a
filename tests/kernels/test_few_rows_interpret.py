"""What is between products in INT4 in Triton's interpreter, against its references."""

import interpreted
from few_rows_laws import FewRowsLaws

pytestmark = interpreted.MARKS


class TestKernels(FewRowsLaws):
    pass
