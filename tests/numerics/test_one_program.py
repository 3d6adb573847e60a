"""Numerics that are called outside of `jit` are one program each, and inside of it no call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.numerics import blocks, expansion, integers, logarithms, noise, qtensor

# Of a shape that no other test has, and has compiled.
X = np.random.default_rng(0).exponential(size=(3, 1, 2, 1, 80)).astype(np.float32)
KEY = noise.leaf_key(0, 1, 2)
CALLS = {
    "blocks": lambda x: blocks.to_blocks(x, size=16, stochastic=True),
    "expansion": lambda x: expansion.encode(x, group_size=16),
    "dithered expansion": lambda x: expansion.encode_dithered(x, "float8_e4m3fn", x, group_size=16),
    "integers": lambda x: integers.encode(x, group_size=16),
    "logarithms": lambda x: logarithms.encode(x, group_size=16),
    "scaled": lambda x: qtensor.quantize(x, group_size=16),
    "noise": lambda x: noise.uniform_pair(KEY, x.shape, run=16),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_program_and_in_a_program_there_is_no_call(name, caplog):
    """So that what surrounds it is fused with it."""
    x = jnp.asarray(X)
    with jax.log_compiles():
        CALLS[name](x)
    compiled = [r for r in caplog.records if r.getMessage().startswith("Finished XLA compilation")]
    assert len(compiled) == 1
    program = jax.jit(CALLS[name]).lower(X).as_text()
    functions = ("to_blocks", "encode", "encode_dithered", "quantize", "uniform_pair")
    assert not [function for function in functions if f"@{function}(" in program]
