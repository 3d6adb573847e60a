"""What is between products in INT4 as compiled for Hopper: whole rows fit into registers."""

import jax
import jax.numpy as jnp
import pytest
from hopper import COMPILED, kernels, spilled_bytes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.kernels import few_rows, int4
from coat_jax.kernels.activation import Limited
from coat_jax.kernels.norm import Norm
from experiments.hopper import compile_for, hopper_mesh, there

pytestmark = COMPILED


@pytest.mark.parametrize(("heads", "kv_heads", "hidden"), [(32, 32, 11008), (64, 8, 28672)])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_whole_rows_are_in_registers(heads, kv_heads, hidden, format, tmp_path):
    """Of Llama 2 7B and of Llama 3 70B."""
    mesh, rows, width = hopper_mesh((1,), ("x",)), 16, heads * 128

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def product(columns, parts):
        return int4.Product(array(parts, rows, columns), array(rows))

    def all_of_them(x, scale, gate, up, heads, cos, sin, o, log_sums):
        return (
            few_rows.normalize(x, Norm(scale)),
            few_rows.activate(gate, up, Limited("silu", 10.0)),
            few_rows.store_heads(heads, cos, sin, format, "bfloat16"),
            few_rows.combine(o, log_sums),
        )

    of_heads = tuple(product(n * 128, 2) for n in (heads, kv_heads, kv_heads))
    angles = array(rows, 64), array(rows, 64)
    attended = array(rows, kv_heads, 8, heads // kv_heads, 128)
    residual = array(rows, width, dtype=jnp.bfloat16), array(width)
    with there():
        program = compile_for(
            mesh,
            all_of_them,
            *residual,
            *(product(hidden, 1), product(hidden, 1), of_heads, *angles),
            *(attended, array(*attended.shape[:-1])),
        )
    ptxs = kernels(program)
    assert len(ptxs) == 4
    assert [spilled_bytes(ptx, tmp_path) for ptx in ptxs] == [0] * 4
