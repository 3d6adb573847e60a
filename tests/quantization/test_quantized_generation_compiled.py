"""Generation with a quantized model as compiled for Hopper: every projection multiplies codes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("jax_triton")
from hopper import can_compile_for_hopper
from small_model import SMALL

from coat_jax import quantization as q
from coat_jax.generation import decode, prefill
from coat_jax.quantization.projections import paths_of
from experiments import decode_step
from experiments.hopper import OPTIONS, compile_for, hopper_mesh, there

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not can_compile_for_hopper(), reason="needs XLA's CUDA plugin"),
]

TEXTS = 7


@pytest.mark.costly
def test_every_projection_multiplies_codes():
    """Seven of each layer, for prompts and for what follows; each layer has a scheme of its own."""
    kinds = list(itertools.product(("int8", "fp8"), ("static", "dynamic")))
    mesh = hopper_mesh((1,), ("x",))
    config = q.inference_config(
        dataclasses.replace(SMALL, layers=len(kinds), param_dtype=jnp.bfloat16)
    )
    schemes = {path: q.Scheme(*kinds[int(path.split(".")[1])]) for path in paths_of(config)}
    graph, state = q.abstract(config, schemes, mesh=mesh)

    def begin(state, tokens, starts):
        return prefill(nnx.merge(graph, state), tokens, starts, 32)

    def go_on(state, tokens, cache):
        return decode(nnx.merge(graph, state), tokens, cache)

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    with there():
        tokens = array((TEXTS, 16)), array((TEXTS,))
        first = compile_for(mesh, begin, state, *tokens, compiler_options=OPTIONS)
        _, cache = jax.eval_shape(begin, state, *tokens)
        cache = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), cache)
        rest = compile_for(mesh, go_on, state, tokens[1], cache, compiler_options=OPTIONS)
    for program in (first, rest):
        products = [line for line in program.as_text().splitlines() if "__cublas$lt" in line]
        assert sum("(s32[" in line for line in products) == 7 * 2
        assert sum("__cublas$lt$matmul$f8" in line for line in products) == 7 * 2


def test_a_layer_in_int4_is_ten_launches():
    """Products share one where they have one input; those of the residual stream also add to it."""
    case = decode_step.measure("llama_124m", "int4", "int8", texts=2, slots=64)
    assert case["layer"] == {
        "few_rows_tile": 2,
        "add_product_tile": 2,
        "normalize_and_round_row": 2,
        "store_head": 1,
        "attend_to_past": 1,
        "combine_and_round_row": 1,
        "activate_and_round_row": 1,
    }
