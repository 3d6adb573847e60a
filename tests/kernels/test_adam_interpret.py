"""The AdamW kernel in Triton's interpreter, against its reference."""

import interpreted
import jax.numpy as jnp
import numpy as np
import pytest
from adam_cases import ALL_FP8, CASES, Case, check, one_step, written
from adam_laws import KernelLaws

from coat_jax.kernels.adam import Hyper, Leaf, Settings
from coat_jax.numerics import integers

pytestmark = interpreted.MARKS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_agrees_with_reference(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_directions_whose_scale_would_have_no_reciprocal_become_zero(implementation: str) -> None:
    """A moment without gradients gets there, if it was small."""
    zeros = jnp.zeros((8, 128))
    mu, nu = written(ALL_FP8, zeros + 1.02 * integers.SMALLEST, zeros + 1.0)
    assert np.all(mu.amax > 0)
    leaf, hyper = Leaf(zeros, zeros, mu, nu), Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 1.0)
    _, after = one_step(implementation, leaf, 7, hyper, Settings(ALL_FP8))
    assert np.all(np.asarray(after.nu.amax) > 0)
    assert not np.any(after.mu.amax)
    assert not np.any(after.mu.codes)


class TestKernels(KernelLaws):
    pass
