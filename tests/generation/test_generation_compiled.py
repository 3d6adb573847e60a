"""The programs of generation as compiled for Hopper."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("jax_triton")
from hopper import can_compile_for_hopper
from small_model import SMALL

from coat_jax import models
from coat_jax.generation import decode, prefill
from experiments.hopper import OPTIONS, compile_for, hopper_mesh, there

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not can_compile_for_hopper(), reason="needs XLA's CUDA plugin"),
]


@pytest.mark.parametrize(("precision", "devices"), [("bf16", 4), ("coat", 1), ("coat_lean", 4)])
def test_texts_are_begun_and_continued(precision, devices):
    """One text on each GPU, and so one row in each product of a further token."""
    mesh = hopper_mesh((devices,), ("data",))
    config = dataclasses.replace(SMALL, precision=precision, batch_axes=("data",))
    graph, state = models.abstract(config, mesh=mesh)

    def both(state, tokens, starts):
        model = nnx.merge(graph, state)
        logits, cache = prefill(model, tokens, starts, 32)
        return decode(model, jnp.argmax(logits, -1), cache)

    arrays = (
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P("data")))
        for shape in ((devices, 16), (devices,))
    )
    with there():
        program = compile_for(mesh, both, state, *arrays, compiler_options=OPTIONS).as_text()
    assert ("matmul$f8" in program) == (precision != "bf16")  # what begins a text has many rows
