"""A linear layer in INT4 as compiled for Hopper: one kernel for few rows, FP8 for many."""

import re

import jax
import jax.numpy as jnp
import pytest
from hopper import COMPILED, copies, kernel_calls, kernels, spilled_bytes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import ops
from coat_jax.kernels import few_rows, int4
from coat_jax.ops.quantized import quantized_linears
from experiments.hopper import OPTIONS, compile_for, hopper_mesh, there

pytestmark = COMPILED

K, N = 11008, 4096
WHOLE = P()


def program(rows, *, of_codes=WHOLE, devices=1, weights=1):
    mesh = hopper_mesh((devices,), ("x",))

    def array(shape, dtype, spec=WHOLE):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weight = ops.Quantized(
        array((N, K // 2), jnp.uint8, of_codes), array((N, K // 128), jnp.bfloat16, of_codes)
    )

    def layer(x, weight):
        several = [weight._replace(scale=weight.scale * (i + 1)) for i in range(weights)]
        return quantized_linears(x, several, [None] * weights, implementation="triton")

    inputs = P(None, *of_codes[1:2])
    with there():
        x = array((rows, K), jnp.bfloat16, inputs)
        return compile_for(mesh, layer, x, weight, compiler_options=OPTIONS)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_few_rows_are_rounded_by_a_kernel_and_multiplied_by_one(rows):
    compiled = program(rows)
    assert kernel_calls(compiled) == 2
    assert "__cublas" not in compiled.as_text()
    # Nothing as large as the weight is made.
    assert compiled.memory_analysis().temp_size_in_bytes < K * N / 4


@pytest.mark.parametrize("weights", [2, 3])
@pytest.mark.parametrize("spec", [None, P("x"), P(None, "x")], ids=["one", "outputs", "inputs"])
def test_weights_of_one_input_share_a_kernel(weights, spec, tmp_path):
    sharded = {} if spec is None else {"of_codes": spec, "devices": 2}
    compiled = program(16, weights=weights, **sharded)
    # On a mesh XLA rounds.
    assert kernel_calls(compiled) == (2 if spec is None else 1)
    ptx = kernels(compiled)[-1]
    assert "mma" in ptx
    assert "cp.async" in ptx  # loads of later steps are under way
    assert spilled_bytes(ptx, tmp_path) == 0


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_parts_are_stored_before_they_are_counted(rows, tmp_path):
    """By all threads, and no other copy of the counts is made."""
    mesh = hopper_mesh((1,), ("x",))

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, WHOLE))

    def layer(x, hidden, *weight):
        return int4.add_product(x, few_rows.normalize(hidden, None), int4.Weight(*weight, None))

    stream, hidden = array((rows, N), jnp.bfloat16), array((rows, K), jnp.bfloat16)
    weight = array((N, K // 2), jnp.uint8), array((N, K // 128), jnp.bfloat16)
    with there():
        compiled = compile_for(mesh, layer, stream, hidden, *weight, compiler_options=OPTIONS)
    assert copies(compiled) == 0
    _, ptx = kernels(compiled)
    assert spilled_bytes(ptx, tmp_path) == 0
    before, after = re.split(r"atom\.global\.gpu\.acq_rel\.add", ptx)
    order = re.compile(r"(st|ld)\.global|(bar)\.sync")
    assert order.findall(before)[-1] == ("", "bar")
    assert order.findall(after)[0] == ("", "bar")


def test_many_rows_are_expansions_and_products_in_fp8(monkeypatch):
    """One of each for each weight; copied side by side, XLA could multiply small ones together."""
    monkeypatch.setitem(OPTIONS, "xla_gpu_dot_merger_threshold_mb", 2 * K * N // 2**20)
    compiled = program(2048, weights=3)
    assert kernel_calls(compiled) == 3
    text = compiled.as_text()
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    assert " concatenate(" not in text


@pytest.mark.parametrize("rows", [4, 2048])
@pytest.mark.parametrize(
    ("spec", "exchange"), [(P("x"), None), (P(None, "x"), "all-reduce")], ids=["outputs", "inputs"]
)
def test_devices_multiply_their_own_codes(spec, exchange, rows):
    compiled = program(rows, of_codes=spec, devices=2)
    assert kernel_calls(compiled) == 1
    text = compiled.as_text()
    assert (
        f"u8[{N // 2 if exchange is None else N},{K // 2 if exchange is None else K // 4}]" in text
    )
    for kind in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {kind}(" not in text
    assert ("all-reduce" in text) == (exchange is not None)
