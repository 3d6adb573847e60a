"""What all ways to store numbers in groups have in common: where groups end, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.numerics import blocks, expansion, integers, logarithms, qtensor
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.quantizer import Quantizer


def there_and_back(module):
    def coded(x, size):
        return module.decode(module.encode(x, group_size=size), group_size=size)

    return coded


CODERS = {
    "qtensor": lambda x, size: qtensor.dequantize(qtensor.quantize(x, group_size=size)),
    "expansion": there_and_back(expansion),
    "integers": there_and_back(integers),
    "logarithms": there_and_back(logarithms),
    "blocks": lambda x, size: blocks.from_blocks(blocks.to_blocks(x, size=size), size=size),
    "quantizer": lambda x, size: Quantizer("E4M3", over="group", size=size)(x),
    "quantizer in blocks": lambda x, size: Quantizer("INT8", over="block", size=size)(x),
}


@pytest.mark.parametrize("shape", [(4, 48), (7,), ()], ids=str)
def test_a_group_larger_than_its_axis_is_the_whole_axis(shape):
    """Not padded, which would take terabytes."""
    x = np.asarray(np.random.default_rng(0).exponential(size=shape), np.float32)

    @jax.jit
    def coded(x):
        return {name: [code(x, size) for size in (10**12, 48)] for name, code in CODERS.items()}

    for name, (larger, whole) in coded(x).items():
        np.testing.assert_array_equal(larger, whole, err_msg=name)


coders = pytest.mark.parametrize("name", CODERS)


@coders
@pytest.mark.parametrize("size", [0, -1, 1.5, True, "16", None])
def test_a_wrong_size_is_refused(name, size):
    with pytest.raises(ValueError, match=r"size must be a positive whole number"):
        CODERS[name](jnp.ones(4), size)


@coders
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_only_real_floats_are_stored(name, dtype):
    with pytest.raises(TypeError, match=rf"x has dtype {dtype}.*real floats"):
        CODERS[name](jnp.ones(4, dtype), 16)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3b11fnuz, "fp8", None])
def test_only_fp8_is_written_and_read(dtype):
    x = jnp.ones(4)
    stored = Expanded(x, jnp.ones(1), jnp.full(1, 16, jnp.uint8))
    for call in (
        lambda: qtensor.quantize(x, dtype, group_size=16),
        lambda: blocks.to_blocks(x, dtype, size=16),
        lambda: expansion.encode(x, dtype),
        lambda: expansion.decode(stored),
    ):
        with pytest.raises(ValueError, match=r"not an FP8 format.*coat\.formats\.E4M3"):
            call()
