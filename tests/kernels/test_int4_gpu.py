"""The kernel of INT4 weights on a GPU, against its reference."""

import jax
import pytest
from int4_laws import Int4Laws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


class TestKernel(Int4Laws):
    sizes = ((4096, 4096), (4096, 11008))
