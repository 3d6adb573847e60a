"""A Llama layer as compiled for Hopper: all products in FP8, no FP8 transposed, weights sharded.

Some tests take over 10 seconds: Triton and XLA compile the kernels of a whole layer.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("jax_triton")
from hopper import KERNEL_CALL, can_compile_for_hopper, kernel_calls

import coat_jax as coat
from coat_jax import ops
from coat_jax.kernels import activation
from coat_jax.numerics.blocks import from_blocks, to_blocks
from experiments.hopper import OPTIONS, compile_for, hopper_mesh, there

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not can_compile_for_hopper(), reason="needs XLA's CUDA plugin"),
]

B, S, D, F, HEAD = 4, 2048, 2048, 5632, 128
WHOLE = P()
ALONE = (WHOLE, WHOLE, WHOLE)
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "triton"])


@pytest.fixture(autouse=True)
def hopper():
    with there():
        yield


def layer(x, w, precision, implementation):
    how = {"precision": precision, "implementation": implementation}
    weights, heads = (w["q"], w["k"], w["v"]), {"head_dim": HEAD, "rotary": ops.Rotary()}
    x, q, k, v = ops.norm_qkv(x, ops.Norm(w["n1"]), weights, **heads, **how)
    x = x + ops.attention_linear(q, k, v, w["o"], backend="cudnn", **how)
    return ops.gated_mlp(x, ops.Norm(w["n2"]), w["gate"], w["up"], w["down"], **how)


def compile_layer(mesh, precision, implementation, specs):
    widening, narrowing, batch = specs

    def array(*shape, spec=WHOLE):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = {name: array(D, D, spec=widening) for name in "qkv"}
    weights |= {name: array(D, F, spec=widening) for name in ("gate", "up")}
    weights |= {"o": array(D, D, spec=narrowing), "down": array(F, D, spec=narrowing)}
    weights |= {"n1": array(D), "n2": array(D)}

    def loss(x, weights):
        y = layer(x, weights, precision, implementation)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    x = array(B, S, D, spec=batch)
    return compile_for(
        mesh,
        jax.grad(loss, argnums=(0, 1)),
        x,
        weights,
        compiler_options=OPTIONS,
        out_shardings=jax.tree.map(lambda a: a.sharding, (x, weights)),
    ).as_text()


def fp8_products(program):
    return program.count('custom_call_target="__cublas$lt$matmul$f8"')


def other_products(program):
    return len(re.findall(r'custom_call_target="__cublas\$(?:lt\$matmul|gemm)"| dot\(', program))


ROUNDED = coat.COAT_PAPER
PRECISIONS = {
    "FP8_LINEAR": coat.FP8_LINEAR,
    "COAT": coat.COAT,
    "COAT_LEAN": coat.COAT_LEAN,
    "rounded forward": ROUNDED,
}


@IMPLEMENTATIONS
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_every_product_of_a_layer_is_in_fp8(precision, implementation):
    """Seven weights, three products each; attention once forward, once backward."""
    program = compile_layer(hopper_mesh((4,), ("x",)), precision, implementation, ALONE)
    assert fp8_products(program) == 21
    assert other_products(program) == 0
    assert program.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert program.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1


def test_forward_products_are_in_int8_and_backward_products_in_fp8():
    """Seven weights, one product forward and two backward; none is transposed or cast by XLA."""
    program = compile_layer(hopper_mesh((4,), ("x",)), coat.COAT_INT8, "triton", ALONE)
    assert fp8_products(program) == 14
    assert other_products(program) == 7
    of_int8 = r'\(s32\[[\d,]+\]\S* .*custom_call_target="__cublas\$lt\$matmul"'
    assert len(re.findall(of_int8, program)) == 7
    made_by_xla = re.findall(r"%\S+ = s8\[\d\S* (?:transpose|copy)\(", program)
    assert made_by_xla == []
    # The kernel of the activation reads the sums of gate and up themselves.
    assert xla_reads(program, rf"\[{B},{S},{F}\]") == []


def test_sums_of_products_are_taken_in_by_the_products():
    """Two residual sums forward; backward one for gate and up, two for query, key and value."""
    program = compile_layer(hopper_mesh((4,), ("x",)), coat.COAT, "triton", ALONE)
    assert program.count('"beta":1') == 5


def test_sums_that_bound_gradients_are_made_by_the_kernels_that_round():
    """XLA makes no pass over arrays as wide as the MLP, and none over dy but that for its scale.

    It adds up one number per row and 16 columns of dy, and of the weight; and it reads exponents.
    """
    for precision in (coat.COAT, ROUNDED):
        program = compile_layer(hopper_mesh((4,), ("x",)), precision, "triton", ALONE)
        assert xla_reads(program, rf"\[{B},{S},{F}\]") == []
        of_dy = xla_reads(program, rf"\[{B},{S},{D}\]")
        # The scales of o's and down's gradients, and the sum of squares of this test's loss.
        assert len(of_dy) <= 4, of_dy
        assert len(xla_reads(program, rf"f32\[{B},{S},{D // 16}\]")) == 1
        assert len(xla_reads(program, rf"f32\[(?:1,)?{F},{D // 16}\]")) == 1
        assert len(xla_reads(program, rf"u8\[{B},{S},{F // 16}\]")) == 1  # gate and up at once


def test_explicit_axes_compile_to_what_automatic_ones_do():
    devices = hopper_mesh((4,), ("fsdp",)).devices
    specs = P("fsdp", None), P(None, "fsdp"), P("fsdp")
    programs = [
        compile_layer(Mesh(devices, ("fsdp",), axis_types=(kind,)), coat.COAT, "triton", specs)
        for kind in (AxisType.Auto, AxisType.Explicit)
    ]
    counts = [
        (fp8_products(program), other_products(program), len(re.findall(KERNEL_CALL, program)))
        for program in programs
    ]
    assert counts[0] == counts[1]
    assert counts[0][:2] == (21, 0)
    assert sorted(collectives_of(programs[0])) == sorted(collectives_of(programs[1]))


def collectives_of(program):
    """The types of what devices send each other."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf"= (\S+) (?:{kinds})(?:-start)?\(", program)


def xla_reads(program, shape):
    """The fusions of a program's entry that read or write an array of this shape."""
    entry = program[program.index("ENTRY ") :]
    types = dict(re.findall(r"(%\S+) = (\S+)", entry))
    found = []
    for result, inputs in re.findall(r"%\S+ = (.*?) fusion\(([^)]*)\)", entry):
        arrays = " ".join([result, *(types.get(name, "") for name in inputs.split(", "))])
        if re.search(shape, arrays):
            found.append(arrays)
    return found


def test_an_exact_forward_pass_takes_no_more_passes_over_memory():
    mesh = hopper_mesh((4,), ("x",))
    rounded, exact = (compile_layer(mesh, p, "triton", ALONE) for p in (ROUNDED, coat.COAT))
    assert exact.count(KERNEL_CALL) == rounded.count(KERNEL_CALL)
    # Besides those that number the blocks for stochastic rounding, which are small.
    of_tensors = re.compile(r"= (?!u32)\S+ fusion\(")
    assert len(of_tensors.findall(exact)) == len(of_tensors.findall(rounded)) > 0
    numbers = re.findall(r"= u32\[([\d,]*)\]\S* fusion\(", exact)
    assert max(math.prod(map(int, shape.split(","))) for shape in numbers) <= 4 * 2048


def test_xla_does_not_remove_the_rounding_of_values_that_a_layer_continues_with():
    """It leaves out a cast to FP8 and back, unless values are rounded before."""
    mesh = hopper_mesh((4,), ("x",))
    x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, WHOLE))
    program = compile_for(
        mesh, lambda x: from_blocks(to_blocks(x, size=16), size=16), x, compiler_options=OPTIONS
    ).as_text()
    assert "f8e4m3fn" not in program
    assert "round-nearest-even" in program


@pytest.mark.parametrize(
    "precision", [coat.COAT, ROUNDED, coat.COAT_INT8], ids=["coat", "rounded forward", "int8"]
)
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_every_activation_compiles(name, precision):
    """With a gate and without one, forward and backward: Triton's interpreter checks no types."""

    def loss(x, up, down):
        how = {"activation": name, "precision": precision, "implementation": "triton"}
        y = ops.gated_mlp(x, None, up, up, down, **how)
        return jnp.sum(ops.mlp(y, None, up, down, **how).astype(jnp.float32))

    mesh = hopper_mesh((4,), ("x",))
    alone = NamedSharding(mesh, WHOLE)
    args = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=alone)
        for shape in ((2, 128, 256), (256, 512), (512, 256))
    )
    program = compile_for(mesh, jax.grad(loss), *args, compiler_options=OPTIONS)
    assert kernel_calls(program) >= 2 * len(("forward", "cast", "backward"))


@pytest.mark.parametrize("rows", [WHOLE, P("x")], ids=["everywhere", "one on each GPU"])
@pytest.mark.parametrize(("k", "n"), [(256, 128), (1, 128), (256, 1)])
def test_a_product_with_a_single_row_or_column_compiles(k, n, rows):
    """A vector has no FP8 product; and where the program has four rows, a GPU of four has one."""
    mesh = hopper_mesh((4,), ("x",))
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((1 if rows == WHOLE else 4, k), rows), ((k, n), WHOLE))
    )

    def loss(x, w):
        return jnp.sum(ops.linear(x, w, precision=coat.COAT).astype(jnp.float32))

    compile_for(mesh, jax.value_and_grad(loss, argnums=(0, 1)), x, w, compiler_options=OPTIONS)


@pytest.mark.parametrize("preset", ["BF16", "COAT", "COAT_LEAN"])
def test_packed_sequences_of_an_odd_length_compile(preset):
    """cuDNN takes no mask of an odd length."""
    mesh = hopper_mesh((4,), ("x",))
    heads, segments, weight = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, WHOLE))
        for shape, dtype in (
            ((2, 19, 2, 64), jnp.bfloat16),
            ((2, 19), jnp.int32),
            ((128, 128), jnp.bfloat16),
        )
    )

    def loss(q, k, v, weight, segments):
        how = {"segments": segments, "precision": getattr(coat, preset), "backend": "cudnn"}
        return jnp.sum(ops.attention_linear(q, k, v, weight, **how).astype(jnp.float32))

    args = heads, heads, heads, weight, segments
    program = compile_for(
        mesh, jax.grad(loss, argnums=(0, 1, 2, 3)), *args, compiler_options=OPTIONS
    ).as_text()
    assert len(re.findall(r'custom_call_target="__cudnn\$fmha\w*Backward"', program)) == 1


def test_in_full_precision_no_product_is_in_fp8():
    program = compile_layer(hopper_mesh((4,), ("x",)), coat.BF16, "xla", ALONE)
    assert (fp8_products(program), other_products(program)) == (0, 21)


def test_kernels_leave_xla_no_fp8_to_transpose():
    program = compile_layer(hopper_mesh((4,), ("x",)), coat.COAT, "triton", ALONE)
    made_by_xla = re.findall(r"%\S+ = f8e\dm\d\w*\[\d\S* (?:fusion|transpose|copy)\(", program)
    assert made_by_xla == []


MESHES = {
    "fsdp": ((1, 4, 1), 0),
    "fsdp and tensor": ((1, 2, 2), None),
    "data and fsdp": ((2, 2, 1), 0),
}


@pytest.mark.parametrize(("shape", "activations_summed"), MESHES.values(), ids=MESHES)
def test_on_a_mesh_weights_travel_in_fp8_and_activations_stay(shape, activations_summed):
    mesh = hopper_mesh(shape, ("data", "fsdp", "tensor"))
    specs = P("fsdp", "tensor"), P("tensor", "fsdp"), P(("data", "fsdp"))
    program = compile_layer(mesh, coat.COAT, "triton", specs)
    gathered = re.findall(r"= (.*) all-gather(?:-start)?\(", program)
    assert gathered
    for result in gathered:
        assert set(re.findall(r"(\w+)\[\d", result)) == {"f8e4m3fn"}
        # Weights have two axes; kernels see them with a third of size 1.
        assert all(len(dims.split(",")) <= 3 for dims in re.findall(r"\[([\d,]+)\]", result))
    assert "all-to-all" not in program
    assert "collective-permute" not in program
    summed = re.findall(rf"= .*\[\d+,{S},\d+\].* all-reduce(?:-start)?\(", program)
    if activations_summed is not None:
        assert len(summed) == activations_summed


def test_on_a_mesh_gradients_are_reduced_to_shards():
    mesh = hopper_mesh((1, 4, 1), ("data", "fsdp", "tensor"))
    specs = P("fsdp", "tensor"), P("tensor", "fsdp"), P(("data", "fsdp"))
    program = compile_layer(mesh, coat.COAT, "triton", specs)
    assert "reduce-scatter" in program
    large = [
        dims
        for result in re.findall(r"= (.*) all-reduce(?:-start)?\(", program)
        for dims in re.findall(r"\[([\d,]+)\]", result)
        if "," in dims
    ]
    assert large == []


def test_bounds_of_gradients_reduce_one_number_per_row_of_the_weight():
    """Everything else that is reduced over the mesh is a scalar, a norm's gradient or activations.

    What scales E4M3 gradients is searched for. Newer releases of XLA reduce the numbers twice.
    """
    mesh = hopper_mesh((1, 2, 2), ("data", "fsdp", "tensor"))
    specs = P("fsdp", "tensor"), P("tensor", "fsdp"), P(("data", "fsdp"))

    def reduced(precision):
        program = compile_layer(mesh, precision, "triton", specs)
        results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", program)
        shapes = [s for result in results for s in re.findall(r"\w+\[([\d,]*)\]", result)]
        return sorted(s for s in shapes if len(s) > 2 and not re.fullmatch(rf"\d+,{S},\d+", s))

    searched = reduced(dataclasses.replace(coat.COAT, backward=coat.E4M3))
    for precision in (coat.COAT, ROUNDED):
        assert reduced(precision) in [
            sorted([*searched, *times * [str(F // 2)]])
            for times in ((1,) if jax.__version_info__ < (0, 12) else (1, 2))
        ]


WIDTHS = {
    "six times 128, on four GPUs": (256, 768, 16),
    "a single 128": (128, 128, 16),
    "a single block": (16, 16, 16),
    "blocks of 128": (128, 256, 128),
    "nothing divides": (32, 48, 16),
}


@pytest.mark.parametrize("rows", [P("x"), P(None, "x"), P(None, None, "x")], ids=str)
@pytest.mark.parametrize("exact", [False, True], ids=["rounded", "exact"])
@pytest.mark.parametrize(("width", "hidden", "block"), WIDTHS.values(), ids=WIDTHS)
def test_every_width_compiles_on_a_mesh(width, hidden, block, exact, rows):
    """Whatever is cut: texts, their tokens, or columns; and weights as tensor parallelism does."""
    mesh = hopper_mesh((4,), ("x",))
    precision = dataclasses.replace(coat.COAT, block=block, exact_forward=exact)

    def loss(x, scale, up, down):
        norm = ops.Norm(scale)
        y = ops.gated_mlp(x, norm, up, up, down, precision=precision, implementation="triton")
        return jnp.sum(y.astype(jnp.float32))

    args = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (
            ((4, 64, width), rows),
            ((width,), WHOLE),
            ((width, hidden), P(None, "x")),
            ((hidden, width), P("x")),
        )
    )
    compile_for(mesh, jax.grad(loss, argnums=(0, 1, 2, 3)), *args, compiler_options=OPTIONS)


def test_xla_is_asked_for_its_fp8_algorithm():
    """Without one it tries its own GEMMs for every product, and compiles 40 times as long."""
    mesh = hopper_mesh((4,), ("x",))
    whole = NamedSharding(mesh, WHOLE)

    def lowered(rows):
        x, w = (
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
            for shape in ((rows, 256), (256, 128))
        )
        with jax.set_mesh(mesh):
            program = jax.jit(lambda x, w: ops.linear(x, w, precision=coat.COAT)).lower(x, w)
        return [line for line in program.as_text().splitlines() if "f8E4M3FN" in line]

    def algorithms(rows):
        return [
            "allow_imprecise_accumulation = true" in line
            for line in lowered(rows)
            if "dot_general" in line
        ]

    assert algorithms(64) == [jax.__version_info__ < (0, 12)]  # newer ones cannot, without a GPU
    assert algorithms(4) == [False]  # a GPU of four may have a single row
