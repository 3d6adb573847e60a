"""The kernel of attention to the past on a GPU, against its reference."""

import jax
import pytest
from attention_to_past_laws import AttentionToPastLaws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


class TestKernel(AttentionToPastLaws):
    cases = (8, 4, 128), (2, 20, 64)
    dtype = "bfloat16"
    bound = 0.02


class TestKernelInFP32(AttentionToPastLaws):
    pass
