"""Experts as compiled for Hopper: how many launches, and what the loops of the products are."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from hopper import COMPILED, kernel_calls, kernels, spilled_bytes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax import ops
from coat_jax.kernels import routing
from experiments.hopper import OPTIONS, hopper_mesh, there

pytestmark = COMPILED

T, K, E, D, F = 2048, 8, 16, 1024, 768
LAUNCHES = {"COAT": 23, "COAT_BF16_FORWARD": 19}
PRODUCTS = {"product_tile": 5, "outer_product_tile": 3}


def compiled(precision, sizes=(1, 1)):
    with there():
        mesh = hopper_mesh(sizes, ("fsdp", "expert"))
        axes = ops.ExpertAxes(("fsdp", "expert"), ("expert",))
        specs = {D: "fsdp", F: "expert"}, {T: ("fsdp", "expert")}

        def like(*shape, dtype=jnp.bfloat16):
            over = P(*map(specs[T in shape].get, shape))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, over))

        def f(x, gate, up, down, experts, weights, dy):
            def mlp(x, gate, up, down, weights):
                how = {"precision": precision, "implementation": "triton", "axes": axes}
                return ops.grouped_mlp(x, gate, up, down, experts, weights, **how)

            y, pull = jax.vjp(mlp, x, gate, up, down, weights)
            return y, *pull(dy)

        args = (like(T, D), like(E, D, F), like(E, D, F), like(E, F, D))
        args += (like(T, K, dtype=jnp.int32), like(T, K, dtype=jnp.float32), like(T, D))
        results = tuple(args[i].sharding for i in (0, 0, 1, 2, 3, 5))
        with jax.set_mesh(mesh):
            return jax.jit(f, out_shardings=results).lower(*args).compile(OPTIONS)


@pytest.fixture(scope="module", params=LAUNCHES)
def named_program(request):
    return request.param, compiled(getattr(coat, request.param))


@pytest.fixture
def program(named_program):
    return named_program[1]


def test_a_layer_takes_23_kernels_and_no_copies(named_program):
    """Forward: x, 3 weights, 3 products, an activation and its scale, the sum over choices.
    Backward: dy, 3 weights, 2 products, the activation, x and dy as columns, 3 sums over rows, the
    sum over choices. Forward products in BF16 need no weights in FP8 and no scale."""
    name, program = named_program
    assert kernel_calls(program) == LAUNCHES[name]
    assert not re.search(r"= (f8\w+|bf16)\[\S+ (copy|copy-start|transpose)\(", program.as_text())


def test_sums_over_choices_are_not_in_memory(program):
    text = program.as_text()
    entry = text[text.index("\nENTRY ") :]
    assert not re.findall(rf"\[{T},{K},{D}\]", entry)
    # What there is of all choices: the results of two products, before they are added up.
    rows = routing.rows_of(T * K, E, routing.ALIGNED)
    assert len(re.findall(rf"= \(?bf16\[{rows},{D}\]", entry)) == 2


def test_products_are_in_fp8_and_load_16_codes_at_a_time(program, tmp_path):
    found = {}
    for ptx in kernels(program):
        (name,) = re.findall(r"\.visible \.entry (\w+)\(", ptx)
        found.setdefault(name, []).append(ptx)
    for name, count in PRODUCTS.items():
        products = found[name]
        assert len(products) == count
        for ptx in products:
            assert re.search(r"wgmma\.mma_async.*\.(e[45]m[23]\.e[45]m[23]|bf16\.bf16)", ptx)
            # Nothing but indices is loaded otherwise.
            assert not re.search(r"ld\.global[.\w]*\.b(8|16)\b", ptx)
            assert "cp.async.cg" in ptx
            assert spilled_bytes(ptx, tmp_path) == 0


def test_devices_gather_codes_and_add_up_in_bf16():
    program = compiled(coat.COAT, (2, 2))
    assert kernel_calls(program) == LAUNCHES["COAT"]
    moved = {"all-gather": [], "reduce-scatter": []}
    for results, kind in re.findall(
        r"= (.*) (all-gather|reduce-scatter)-start\(", program.as_text()
    ):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]+)\]", results):
            moved[kind].append((dtype, math.prod(map(int, shape.split(",")))))
    # Tokens, and all weights for each pass. Numbers of experts, weights and bounds are wide.
    tokens, weights = T // 2 * D, E * D * F // 2
    gathered = [size for dtype, size in moved["all-gather"] if dtype.startswith("f8")]
    assert gathered.count(tokens) >= 2
    assert gathered.count(weights) == 6
    assert all(size <= T // 2 * K for dtype, size in moved["all-gather"] if dtype[:2] != "f8")
    assert moved["reduce-scatter"].count(("bf16", tokens)) == 2
    assert moved["reduce-scatter"].count(("bf16", weights)) == 3
