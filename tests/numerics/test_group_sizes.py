"""A group ends where its axis ends, in whatever way its numbers are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.numerics import blocks, expansion, integers, logarithms, qtensor
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
}


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("shape", [(4, 48), (7,), (), (3, 1)], ids=str)
def test_a_group_larger_than_its_axis_is_the_whole_axis(name, shape):
    """Not padded, which would take terabytes."""
    x = jnp.asarray(np.random.default_rng(0).exponential(size=shape), jnp.float32)
    larger, whole = jax.jit(lambda x: [CODERS[name](x, size) for size in (10**12, 48)])(x)
    np.testing.assert_array_equal(larger, whole)
