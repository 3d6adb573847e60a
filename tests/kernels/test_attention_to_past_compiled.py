"""Attention to the past as compiled for Hopper: each GPU reads its own texts and heads."""

import jax
import jax.numpy as jnp
import pytest
from attention_to_past_laws import FORMATS, draw
from hopper import COMPILED, collectives, kernel_calls, kernels, spilled_bytes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import ops
from experiments.hopper import compile_for, hopper_mesh, there

pytestmark = COMPILED


@pytest.mark.parametrize(("group", "width"), [(1, 64), (8, 128), (20, 64)])
@pytest.mark.parametrize("format", FORMATS)
def test_a_kernel_reads_the_past_in_registers_and_without_an_exchange(
    format, group, width, tmp_path
):
    mesh = hopper_mesh((2, 2), ("data", "tensor"))
    shapes = jax.eval_shape(lambda: draw(2, 256, 4, group, width, format, "bfloat16"))
    specs = P("data", None, "tensor"), P(None, "data", "tensor"), P("data", "tensor")
    q, past, new = (
        jax.tree.map(
            lambda x, spec=spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            ),
            one,
        )
        for one, spec in zip(shapes, specs, strict=True)
    )
    first = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))

    def attend(q, past, new, first, filled, layer):
        return ops.attention_to_past(q, new, ops.Visible(past, layer, first, filled))

    with there():
        program = compile_for(mesh, attend, q, past, new, first, number, number)
    assert kernel_calls(program) == 1
    assert not collectives(program)
    (ptx,) = kernels(program)
    assert ("mma.sync" in ptx) == (group > 1)
    assert spilled_bytes(ptx, tmp_path) == 0
