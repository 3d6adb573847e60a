"""The kernels for experts on a GPU, against their references."""

import jax
import pytest
from grouped_laws import GroupedLaws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


class TestKernels(GroupedLaws):
    tokens = 1500, 6
    experts = 12
    widths = 1104, 752
    dtype = "bfloat16"
    exact = 0.01  # sums in the tensor cores: `gemm.SUM_ROUNDING`
    alike = 0.08
