"""A quantized linear layer as compiled for Hopper: one GEMM of cuBLASLt on the codes themselves."""

import re

import jax
import jax.numpy as jnp
import pytest
from hopper import COMPILED
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import ops
from coat_jax.numerics import eight_bits
from coat_jax.numerics.eight_bits import DTYPES
from experiments.hopper import OPTIONS, compile_for, hopper_mesh, there

pytestmark = COMPILED

K, N = 4096, 2816
OF_INT8 = re.compile(r"\(s32\[(\d+),2816\].*custom-call.*__cublas\$lt\$matmul\"")
OF_FP8 = re.compile(r"\(bf16\[(\d+),2816\].*custom-call.*__cublas\$lt\$matmul\$f8\"")


def program(rows, format, activations):
    mesh = hopper_mesh((1,), ("x",))

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    static = array((), jnp.float32) if activations == "static" else None
    weight = ops.Quantized(array((N, K), DTYPES[format]), array((N,), jnp.float32), static)

    def layer(x, weight):
        return ops.quantized_linear(x, weight, activations=activations)

    x = array((rows, K), jnp.bfloat16)
    with there():
        return compile_for(mesh, layer, x, weight, compiler_options=OPTIONS)


def entry(compiled):
    text = compiled.as_text()
    return text[text.index("ENTRY ") :]


@pytest.mark.parametrize("activations", ["static", "dynamic"])
@pytest.mark.parametrize("rows", [2048, 71, 7])
def test_codes_are_multiplied_as_they_are(rows, activations):
    """INT8 in INT32 and FP8 in FP8, for a prompt and for a batch of single tokens. A few rows are
    filled up to what cuBLASLt takes: to a multiple of 4 for INT8, of 16 for FP8, which is not for
    fewer; in FP8 after their codes are written. No weight is transposed or cast."""
    for format, product, least in (("int8", OF_INT8, 4), ("fp8", OF_FP8, 16)):
        text = entry(program(rows, format, activations))
        found = [int(count) for count in product.findall(text)]
        assert found == [-(-rows // least) * least]
        assert text.count("__cublas") == 1
        kind = {"int8": "s8", "fp8": "f8e4m3fn"}[format]
        made = re.findall(rf"= \(?{kind}\[(\d+),(\d+)\]\S* (?:fusion|copy|transpose|pad)\(", text)
        before = {rows} if format == "fp8" else set()
        assert made == [(str(count), str(K)) for count in sorted({*before, *found})]


@pytest.mark.parametrize("format", DTYPES)
def test_one_token_reads_codes_without_a_gemm(format):
    """A sum that XLA fuses: the weight is read once, as the bytes that it has."""
    for activations in ("none", "static", "dynamic"):
        compiled = program(1, format, activations)
        assert "__cublas" not in compiled.as_text()
        assert compiled.memory_analysis().temp_size_in_bytes < K * N / 8
        # XLA drops a cast of inputs that another follows.
        if format == "fp8" and activations != "none":
            assert "nearest-even" in compiled.as_text()


def test_weights_alone_are_cast_for_the_product():
    """What prompts cost then: a copy of the weight in BF16, as long as the product takes."""
    compiled = program(2048, "int8", "none")
    assert f"bf16[{N},{K}]" in entry(compiled)
    assert compiled.memory_analysis().temp_size_in_bytes >= 2 * K * N


def test_the_error_of_fp8_is_computed():
    """XLA would leave out a cast to FP8 and back, and the error would be zero."""
    mesh = hopper_mesh((1,), ("x",))
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=NamedSharding(mesh, P()))

    def values(x):
        return eight_bits.rounded(x, jnp.float32(0.5), "fp8")

    with there():
        text = compile_for(mesh, values, x, compiler_options=OPTIONS).as_text()
    assert "round-nearest-even" in text
