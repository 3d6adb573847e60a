"""What is between products in INT4 on a GPU, against its references."""

import jax
import pytest
from few_rows_laws import FewRowsLaws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


class TestKernels(FewRowsLaws):
    pass
