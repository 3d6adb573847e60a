"""The programs of generation as compiled for Hopper."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("jax_triton")
from hopper import can_compile_for_hopper, kernel_calls
from small_model import SMALL

from coat_jax import models
from coat_jax.generation import Sampling, continuation, decode, prefill
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


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "list"])
@pytest.mark.parametrize("cache", [None, "int8", "fp8", "int4"])
def test_a_further_token_copies_nothing_of_the_cache(cache, scan):
    """Kernels read the arrays of all layers, and the new token is written into them in place."""
    mesh, slots, layers = hopper_mesh((1,), ("data",)), 192, 3
    config = dataclasses.replace(SMALL, layers=layers, head_dim=64, scan=scan)
    graph, state = models.abstract(config, mesh=mesh)
    greedy = Sampling(temperature=0)

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def begin(state, stops, *inputs):
        arguments = greedy, stops, graph, state, slots, cache, *inputs
        return continuation._begin.__wrapped__(*arguments)

    def go_on(state, stops, session):
        return continuation._continue.__wrapped__(greedy, stops, graph, state, session)

    texts = array((2,))
    given = state, texts, array((2, 16)), texts, texts, array((2,), jnp.uint32)
    with there():
        _, session = jax.eval_shape(begin, *given)
        session = jax.tree.map(lambda x: array(x.shape, x.dtype), session)
        how = {"compiler_options": OPTIONS, "donate_argnums": 2}
        program = compile_for(mesh, go_on, state, texts, session, **how)
    assert kernel_calls(program) == (1 if scan else layers)
    arrays = len(jax.tree.leaves(session.cache.past))
    in_slots = re.findall(rf"= \w+\[[\d,]*\b{slots}\b[^\]]*\]\S* ([\w-]+)\(", program.as_text())
    free = {"parameter", "get-tuple-element", "bitcast"}
    assert set(in_slots) <= free | {"dynamic-update-slice", "fusion"}
    assert in_slots.count("dynamic-update-slice") == in_slots.count("fusion") == arrays
