"""Muon as compiled for four Hoppers: what is computed where, and what is communicated."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from hopper import COMPILED, collectives, compile_step_in_place
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from experiments.hopper import OPTIONS, hopper_mesh

pytestmark = COMPILED

STEPS = 5
SHAPES = {"square": (8, 512, 512), "wide": (4, 512, 1024), "tall": (4, 1024, 512)}


def compile_step(mesh, spec, **arguments):
    """The donated step of parameters in BF16, sharded by `spec`, on momentum in 8 bits."""
    optimizer = coat.optax.in_place(coat.optax.fp8_muon(0.02, **arguments))
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for name, shape in SHAPES.items()
    }
    return compile_step_in_place(mesh, optimizer, params, compiler_options=OPTIONS)


def elements_of_products(program):
    """How many elements all matrix products of one device have."""
    found = re.findall(r"bf16\[([\d,]+)\]\S*(?:, \S+\))? custom-call\(.*matmul", program.as_text())
    return sum(math.prod(map(int, dims.split(","))) for dims in found)


@pytest.mark.parametrize(
    ("sizes", "names", "spec", "others"),
    [
        ((4,), ("fsdp",), P(None, "fsdp"), set()),
        ((2, 2), ("fsdp", "tensor"), P(None, "fsdp", "tensor"), set()),
        ((2, 2), ("data", "fsdp"), P(None, "fsdp"), {"all-gather"}),  # over "data"
    ],
)
def test_each_matrix_travels_to_one_device_by_all_to_all_in_16_bits(
    sizes, names, spec, others, capfd
):
    """So no device computes what another computes."""
    program = compile_step(hopper_mesh(sizes, names), spec)
    assert set(collectives(program)) == {"all-to-all", "all-reduce"} | others
    assert "rematerialization" not in capfd.readouterr().err
    moved = re.findall(
        r"= \(\((.*)\), .*\) all-to-all-start|= (\S+) all-to-all\(", program.as_text()
    )
    assert moved
    assert all("f32[" not in types for pair in moved for types in pair)
    in_all = 0
    for batch, m, n in SHAPES.values():
        small, large = min(m, n), max(m, n)
        in_all += batch * STEPS * (2 * small * small + small * large)
    assert elements_of_products(program) == in_all // 4


def test_one_number_per_column_is_reduced_only_where_columns_are_sharded():
    def reduced(spec):
        text = compile_step(hopper_mesh((4,), ("fsdp",)), spec).as_text()
        return re.findall(r"(\S+)\{\S* all-reduce(?:-start)?\(", text)

    columns = sum(batch * n for batch, _, n in SHAPES.values())
    assert reduced(P(None, "fsdp")) == [f"f32[{columns}]"]
    assert not reduced(P(None, None, "fsdp"))
