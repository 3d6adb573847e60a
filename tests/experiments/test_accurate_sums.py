"""FP8 products of the backward pass that are summed in FP32."""

import re

import jax
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import ops
from coat_jax.kernels import gemm
from experiments.loss_study import sums

X, W = np.ones((64, 32), np.float32), np.ones((32, 48), np.float32)
FORWARD, INPUT, WEIGHT = (64, 48), (64, 32), (32, 48)  # the shapes of the three products


def summed_in_fp32():
    """Which products of a layer in COAT are so on a GPU, by the shapes of their results."""

    def gradients(x, w):
        return jax.vjp(lambda x, w: ops.linear(x, w, precision=coat.COAT), x, w)[1](x @ w)

    program = str(jax.make_jaxpr(gradients)(X, W))
    product = (
        r"\[(?:1,)?(\d+),(\d+)\] = dot_general\[\s+dimension_numbers=.*\s+precision=(ANY_F8\w+)"
    )
    found = {(int(m), int(n)): how for m, n, how in re.findall(product, program)}
    assert found.keys() == {FORWARD, INPUT, WEIGHT}
    return {shape for shape, how in found.items() if "FAST" not in how}


@pytest.mark.parametrize(
    ("names", "accurate"),
    [
        ((), set()),
        (("gradient of the weight",), {WEIGHT}),
        (tuple(sums.PRODUCTS), {WEIGHT, INPUT}),
    ],
)
def test_only_the_named_products_are_summed_in_fp32(names, accurate):
    fast = gemm.FP8
    with sums.accurate(names):
        assert summed_in_fp32() == accurate
    assert fast == gemm.FP8


def test_it_ends_with_its_block():
    with pytest.raises(RuntimeError, match="stopped"), sums.accurate(tuple(sums.PRODUCTS)):
        raise RuntimeError("stopped")
    assert summed_in_fp32() == set()
