"""What the examples assert can fail."""

import jax
import numpy as np
import pytest

from examples import check
from examples.check import Run

WIDE, NARROW = np.zeros((128, 128), np.float32), np.zeros(128, np.float32)
BYTE = np.arange(128 * 128, dtype=np.uint8).reshape(128, 128)
BOTH = "f8e4m3fn", "f8e5m2"
WIDE, NARROW, BYTE = jax.device_put((WIDE, NARROW, BYTE))
PARAMS = {"w": WIDE, "norm": NARROW}


def test_two_moments_of_8_bits_pass() -> None:
    check.require_8_bit_moments(Run([], PARAMS, [BYTE, BYTE, NARROW]))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([BYTE], "expected"),
        ([WIDE, WIDE], "expected"),
        ([BYTE, BYTE, WIDE], "more than 8 bits"),
        ([BYTE, 0 * BYTE], r"\(128, 128\)} had no gradient"),
    ],
)
def test_other_moments_do_not(state: list, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check.require_8_bit_moments(Run([], PARAMS, state))


def test_small_parameters_prove_nothing() -> None:
    with pytest.raises(AssertionError, match="large enough"):
        check.require_8_bit_moments(Run([], {"norm": NARROW}, []))


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [([6.0, 5.0], [6.0, 5.06], "1.2% off"), ([6.0, 5.9], [6.0, 5.9], "hardly fell")],
)
def test_another_loss_does_not_pass(theirs: list, ours: list, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check.require_same_loss(Run(theirs, {}, []), Run(ours, {}, []))


def test_the_same_loss_within_a_percent_passes() -> None:
    check.require_same_loss(Run([6.0, 5.0], {}, []), Run([6.0, 5.04], {}, []))


def test_a_program_without_fp8_does_not_pass() -> None:
    check.require_fp8(Run([], {}, [], "tensor<2xf8E4M3FN>, tensor<2xf8E5M2>"), *BOTH)
    with pytest.raises(AssertionError, match="f8e5m2"):
        check.require_fp8(Run([], {}, [], "f8_e4m3fn[2] bf16[2]"), *BOTH)


def test_batches_are_the_same_every_time() -> None:
    first, again = (next(check.batches()) for _ in range(2))
    assert (first == again).all()
    assert first.shape == (check.BATCH, check.LENGTH)
