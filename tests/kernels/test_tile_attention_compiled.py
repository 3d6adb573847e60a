"""Tile attention as compiled for Hopper: on a mesh each GPU has its own samples and heads."""

import re

import jax
import jax.numpy as jnp
import pytest
from hopper import COMPILED, kernel_calls
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import ops
from coat_jax.ops.tiles import Tiles
from experiments.hopper import OPTIONS, hopper_mesh, there

pytestmark = COMPILED

TILES = Tiles((7, 18, 8), (7, 9, 4))


@pytest.mark.parametrize("spec", [P(), P("data", None, "tensor")], ids=["whole", "sharded"])
@pytest.mark.parametrize("format", ["fp8", "bf16"])
def test_gradients_take_seven_kernels_and_no_exchange(format, spec):
    """Three gather, one attends; one gathers do, two differentiate. Scales are global maxima."""
    with there():
        mesh = hopper_mesh((2, 2), ("data", "tensor"))
        array = jax.ShapeDtypeStruct(
            (2, 7 * 18 * 8, 4, 128), jnp.bfloat16, sharding=NamedSharding(mesh, spec)
        )

        def f(q, k, v, do):
            how = {"format": format, "implementation": "triton"}
            attend = lambda *qkv: ops.tile_attention(*qkv, TILES, **how)  # noqa: E731
            return jax.vjp(attend, q, k, v)[1](do)

        with jax.set_mesh(mesh):
            program = jax.jit(f).lower(*[array] * 4).compile(OPTIONS)
    assert kernel_calls(program) == 7
    text = program.as_text()
    exchanged = re.findall(r"(\S+) = (\S+) (?:all-gather|all-to-all|collective-permute)", text)
    assert not exchanged
    reduced = re.findall(r" = (.*?) all-reduce(?:-start)?\(", text)
    assert all(re.fullmatch(r"f32\[\d?\]\{0?\}|f32\[\]", shape) for shape in reduced)
