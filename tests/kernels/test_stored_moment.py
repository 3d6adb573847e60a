"""What is specified of a moment that is read and rewritten, without kernels.

`stored_moment_cases` compares the kernels with it.
"""

import numpy as np
import pytest
from stored_moment_cases import ALL_FP8, Case, ReferenceLaws, stored_of

from coat_jax.kernels import stored_moment
from coat_jax.numerics import noise
from coat_jax.numerics.expansion import Expanded

KEY = noise.leaf_key(0, 1, 2)


class TestReference(ReferenceLaws):
    implementation = "xla"


def test_the_kernels_refuse_float64():
    stored = Expanded(*(np.asarray(a) for a in stored_of(Case("", (4, 128)))))
    new = np.zeros((4, 128), np.float64)
    with pytest.raises(ValueError, match="moments of up to 32 bits, and this one is float64"):
        stored_moment.rewrite(stored, new, ALL_FP8, KEY, "triton")


def test_small_numbers_become_zero_only_in_groups_with_negative_numbers():
    """A transformation divides by moments that are never negative: none of them may vanish."""
    new = np.full((16, 256), 1e-12, np.float32)
    new[:, 0], new[:, 128] = 1.0, -1.0
    empty = ALL_FP8.write(np.zeros_like(new), ALL_FP8.other)
    after = stored_moment.rewrite_reference(empty, new, ALL_FP8, KEY)
    values = np.asarray(stored_moment.read_reference(after, ALL_FP8))
    assert np.all(values[:, :128] > 0)
    assert np.mean(values[:, 129:] == 0) > 0.9
