"""What is specified of a moment that is read and rewritten, without kernels.

`stored_moment_cases` compares the kernels with it.
"""

import numpy as np
import pytest
from stored_moment_cases import ALL_FP8, Case, moment_of, poorly_stored_of, stored_of

from coat_jax.kernels import stored_moment
from coat_jax.numerics import noise
from coat_jax.numerics.expansion import Expanded

KEY = noise.leaf_key(0, 1, 2)


@pytest.mark.parametrize("columns", [384, 300], ids=["whole groups", "a short last group"])
def test_a_group_keeps_what_is_stored_until_a_value_changes(columns):
    """Bit for bit, though the group would be given another k for the same values."""
    stored = poorly_stored_of(Case("", (6, columns)))
    values = stored_moment.read_reference(stored, ALL_FP8)
    same = stored_moment.rewrite_reference(stored, values, ALL_FP8, KEY)
    for a, b in zip(same, stored, strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))
    moved = values.at[2, 130].mul(2).at[4, 299].mul(2)
    after = stored_moment.rewrite_reference(stored, moved, ALL_FP8, KEY)
    rewritten = np.nonzero(np.asarray(after.k16) != 9)
    assert list(zip(*rewritten, strict=True)) == [(2, 1), (4, 2)]


def test_the_kernels_refuse_float64():
    stored = Expanded(*(np.asarray(a) for a in stored_of(Case("", (4, 128)))))
    new = np.zeros((4, 128), np.float64)
    with pytest.raises(ValueError, match="moments of up to 32 bits, and this one is float64"):
        stored_moment.rewrite(stored, new, ALL_FP8, KEY, "triton")


def test_without_a_gpu_the_references_run():
    case = Case("", (4, 128))
    stored, new = stored_of(case), moment_of(case, 1)
    got = stored_moment.rewrite(stored, new, ALL_FP8, KEY)
    wanted = stored_moment.rewrite_reference(stored, new, ALL_FP8, KEY)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_small_numbers_become_zero_only_in_groups_with_negative_numbers():
    """A transformation divides by moments that are never negative: none of them may vanish."""
    new = np.full((16, 256), 1e-12, np.float32)
    new[:, 0], new[:, 128] = 1.0, -1.0
    empty = ALL_FP8.write(np.zeros_like(new), ALL_FP8.other)
    after = stored_moment.rewrite_reference(empty, new, ALL_FP8, KEY)
    values = np.asarray(stored_moment.read_reference(after, ALL_FP8))
    assert np.all(values[:, :128] > 0)
    assert np.mean(values[:, 129:] == 0) > 0.9
