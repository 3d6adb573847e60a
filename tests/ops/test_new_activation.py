"""An activation of one's own is one entry of ACTIVATIONS."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import can_compile_for_hopper, kernel_calls
from ops_cases import distance, draw, pulled, weight

from coat_jax import ops
from coat_jax.kernels.activation import HAVE_KERNELS
from experiments.hopper import OPTIONS, compile_for, hopper_mesh, there

D, F = 32, 64


def mish(x):
    return x * jnp.tanh(jax.nn.softplus(x))


@pytest.fixture(autouse=True)
def entry(monkeypatch):
    monkeypatch.setitem(ops.ACTIVATIONS, "mish", mish)


def gated(x, gate, up, down, precision="coat", implementation=None, activation="mish"):
    how = {"precision": precision, "implementation": implementation, "activation": activation}
    return ops.gated_mlp(x, None, gate, up, down, **how)


ARGUMENTS = draw(1, (2, 3, D)), weight(2, D, F), weight(3, D, F), weight(4, F, D)


@pytest.mark.parametrize(("precision", "rtol"), [("bf16", 2**-6), ("coat", 0.15)])
def test_it_is_computed_and_differentiated(precision, rtol):
    def plain(x, gate, up, down):
        return x + (mish(x @ gate) * (x @ up)) @ down

    got, wanted = (pulled(f, *ARGUMENTS)[:2] for f in (partial(gated, precision=precision), plain))
    assert np.all(distance(got, wanted) < rtol)


def test_it_saves_what_other_activations_save():
    """x, gate and up in FP8 blocks."""

    def saved(activation):
        f = partial(gated, activation=activation)
        leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *ARGUMENTS))
        return sorted((leaf.shape, leaf.dtype.name) for leaf in leaves)

    assert saved("mish") == saved("silu")


@pytest.mark.compiled
@pytest.mark.skipif(not can_compile_for_hopper(), reason="needs XLA's CUDA plugin")
def test_beside_the_kernels_it_runs_through_xla():
    assert "silu" in HAVE_KERNELS
    assert "mish" not in HAVE_KERNELS
    shapes = [(2, 256, 512), (512, 1024), (512, 1024), (1024, 512)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def loss(x, gate, up, down):
        y = gated(x, gate, up, down, "coat", "triton")
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    with there():
        program = compile_for(
            hopper_mesh((1,), ("x",)), jax.grad(loss), *arrays, compiler_options=OPTIONS
        )
    assert kernel_calls(program)  # casts
