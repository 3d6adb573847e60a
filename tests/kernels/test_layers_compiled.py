"""A Llama layer as compiled for Hopper: all products in FP8, no FP8 transposed, weights sharded.

Triton and XLA take seconds to compile a whole layer, so tests share the programs.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from hopper import COMPILED, KERNEL_CALL, kernel_calls, kernels, spilled_bytes
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax import ops
from coat_jax.kernels import activation
from coat_jax.numerics.blocks import from_blocks, to_blocks
from experiments.hopper import OPTIONS, compile_for, hopper_mesh, there

pytestmark = COMPILED

B, S, D, F, HEAD = 4, 2048, 2048, 5632, 128
WHOLE = P()
ROUNDED = coat.COAT_PAPER
MESHES = {"alone": (1, 4, 1), "fsdp": (1, 4, 1), "fsdp and tensor": (1, 2, 2), "data": (2, 2, 1)}


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


@functools.cache
def compiled_layer(precision=coat.COAT, implementation="triton", where="alone", kind=AxisType.Auto):
    """The program of a layer's gradients, alone or with its arrays sharded over a mesh."""
    axes = ("data", "fsdp", "tensor")
    devices = hopper_mesh(MESHES[where], axes).devices
    mesh = Mesh(devices, axes, axis_types=(kind,) * 3)
    specs = P("fsdp", "tensor"), P("tensor", "fsdp"), P(("data", "fsdp"))
    widening, narrowing, batch = [WHOLE] * 3 if where == "alone" else specs

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


def compiled_for_four(function, *arrays):
    """The program of a function on four GPUs; arrays are pairs of shapes and PartitionSpecs."""
    mesh = hopper_mesh((4,), ("x",))
    args = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in arrays
    )
    return compile_for(mesh, function, *args, compiler_options=OPTIONS)


def fp8_products(program):
    return program.count('custom_call_target="__cublas$lt$matmul$f8"')


def other_products(program):
    return len(re.findall(r'custom_call_target="__cublas\$(?:lt\$matmul|gemm)"| dot\(', program))


@pytest.mark.parametrize(
    ("precision", "implementation"),
    [
        pytest.param(coat.COAT, "xla", id="COAT by XLA"),
        pytest.param(coat.FP8_LINEAR, "triton", id="FP8_LINEAR"),
        pytest.param(coat.COAT_LEAN, "triton", id="COAT_LEAN"),
        pytest.param(ROUNDED, "triton", id="rounded forward"),
        pytest.param(coat.COAT, "triton", id="COAT"),
    ],
)
def test_every_product_of_a_layer_is_in_fp8(precision, implementation):
    """Seven weights, three products each; attention once forward, once backward."""
    program = compiled_layer(precision, implementation)
    assert fp8_products(program) == 21
    assert other_products(program) == 0
    assert program.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert program.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1


def test_in_full_precision_no_product_is_in_fp8():
    program = compiled_layer(coat.BF16, "xla")
    assert (fp8_products(program), other_products(program)) == (0, 21)


def test_forward_products_are_in_int8_and_backward_products_in_fp8():
    """Seven weights, one product forward and two backward; none is transposed or cast by XLA."""
    program = compiled_layer(coat.COAT_INT8)
    assert fp8_products(program) == 14
    assert other_products(program) == 7
    of_int8 = r'\(s32\[[\d,]+\]\S* .*custom_call_target="__cublas\$lt\$matmul"'
    assert len(re.findall(of_int8, program)) == 7
    made_by_xla = re.findall(r"%\S+ = s8\[\d\S* (?:transpose|copy)\(", program)
    assert made_by_xla == []
    # The kernel of the activation reads the sums of gate and up themselves.
    assert xla_reads(program, rf"\[{B},{S},{F}\]") == []


def test_forward_products_are_in_bf16_and_backward_products_in_fp8():
    """What they take comes from the kernels that save it: XLA reads none of the hidden arrays."""
    program = compiled_layer(coat.COAT_BF16_FORWARD)
    assert (fp8_products(program), other_products(program)) == (14, 7)
    assert re.findall(r"%\S+ = f8e\dm\d\w*\[\d\S* (?:fusion|transpose|copy)\(", program) == []
    assert xla_reads(program, rf"\[{B},{S},{F}\]") == []


def test_kernels_leave_xla_no_fp8_to_transpose_and_products_take_in_sums():
    """Two residual sums forward; backward one for gate and up, two for query, key and value."""
    program = compiled_layer()
    made_by_xla = re.findall(r"%\S+ = f8e\dm\d\w*\[\d\S* (?:fusion|transpose|copy)\(", program)
    assert made_by_xla == []
    assert program.count('"beta":1') == 5


@pytest.mark.parametrize("precision", [coat.COAT, ROUNDED], ids=["COAT", "rounded forward"])
def test_sums_that_bound_gradients_are_made_by_the_kernels_that_round(precision):
    """XLA makes no pass over arrays as wide as the MLP, and none over dy but that for its scale.

    It adds up one number per row and 16 columns of dy, and of the weight; and it reads exponents.
    """
    program = compiled_layer(precision)
    assert xla_reads(program, rf"\[{B},{S},{F}\]") == []
    of_dy = xla_reads(program, rf"\[{B},{S},{D}\]")
    # The scales of o's and down's gradients, and the sum of squares of this test's loss.
    assert len(of_dy) <= 4, of_dy
    assert len(xla_reads(program, rf"f32\[{B},{S},{D // 16}\]")) == 1
    assert len(xla_reads(program, rf"f32\[(?:1,)?{F},{D // 16}\]")) == 1
    assert len(xla_reads(program, rf"u8\[{B},{S},{F // 16}\]")) == 1  # gate and up at once


def test_explicit_axes_compile_to_what_automatic_ones_do():
    programs = [compiled_layer(where="fsdp", kind=k) for k in (AxisType.Auto, AxisType.Explicit)]
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
    rounded, exact = compiled_layer(ROUNDED), compiled_layer()
    assert exact.count(KERNEL_CALL) == rounded.count(KERNEL_CALL)
    # Besides those that number the blocks for stochastic rounding, which are small.
    of_tensors = re.compile(r"= (?!u32)\S+ fusion\(")
    assert len(of_tensors.findall(exact)) == len(of_tensors.findall(rounded)) > 0
    numbers = re.findall(r"= u32\[([\d,]*)\]\S* fusion\(", exact)
    assert max(math.prod(map(int, shape.split(","))) for shape in numbers) <= 4 * 2048


@pytest.mark.parametrize("where", ["fsdp", "fsdp and tensor", "data"])
def test_on_a_mesh_weights_travel_in_fp8_and_activations_stay(where):
    program = compiled_layer(where=where)
    gathered = re.findall(r"= (.*) all-gather(?:-start)?\(", program)
    assert gathered
    for result in gathered:
        assert set(re.findall(r"(\w+)\[\d", result)) == {"f8e4m3fn"}
        # Weights have two axes; kernels see them with a third of size 1.
        assert all(len(dims.split(",")) <= 3 for dims in re.findall(r"\[([\d,]+)\]", result))
    assert "all-to-all" not in program
    assert "collective-permute" not in program
    if where != "fsdp and tensor":
        assert not re.findall(rf"= .*\[\d+,{S},\d+\].* all-reduce(?:-start)?\(", program)


def test_on_a_mesh_gradients_are_reduced_to_shards():
    program = compiled_layer(where="fsdp")
    assert "reduce-scatter" in program
    assert [shape for shape in reduced(program) if "," in shape] == []


def reduced(program):
    """The shapes of what devices add up."""
    results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", program)
    return [shape for result in results for shape in re.findall(r"\w+\[([\d,]*)\]", result)]


def test_bounds_of_gradients_reduce_one_number_per_row_of_the_weight():
    """Everything else that is reduced over the mesh is a scalar, a norm's gradient or activations.

    What scales E4M3 gradients is searched for. Newer releases of XLA reduce the numbers twice.
    """

    def vectors(precision):
        shapes = reduced(compiled_layer(precision, where="fsdp and tensor"))
        return sorted(s for s in shapes if len(s) > 2 and not re.fullmatch(rf"\d+,{S},\d+", s))

    searched = vectors(dataclasses.replace(coat.COAT, backward=coat.E4M3))
    assert vectors(coat.COAT) in [
        sorted([*searched, *times * [str(F // 2)]])
        for times in ((1,) if jax.__version_info__ < (0, 12) else (1, 2))
    ]


def test_xla_does_not_remove_the_rounding_of_values_that_a_layer_continues_with():
    """It leaves out a cast to FP8 and back, unless values are rounded before."""
    program = compiled_for_four(
        lambda x: from_blocks(to_blocks(x, size=16), size=16), ((512, 1024), WHOLE)
    ).as_text()
    assert "f8e4m3fn" not in program
    assert "round-nearest-even" in program


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, coat.COAT) for name in activation.ACTIVATIONS),
        ("gelu_tanh", ROUNDED),
        ("gelu_tanh", coat.COAT_INT8),
    ],
)
def test_every_activation_compiles(name, precision):
    """With a gate and without one, forward and backward: Triton's interpreter checks no types."""

    def loss(x, up, down):
        how = {"activation": name, "precision": precision, "implementation": "triton"}
        y = ops.gated_mlp(x, None, up, up, down, **how)
        return jnp.sum(ops.mlp(y, None, up, down, **how).astype(jnp.float32))

    shapes = (2, 128, 256), (256, 512), (512, 256)
    program = compiled_for_four(jax.grad(loss), *((shape, WHOLE) for shape in shapes))
    assert kernel_calls(program) >= 2 * len(("forward", "cast", "backward"))


def test_a_limit_of_the_activation_costs_no_pass_and_no_memory(tmp_path):
    """Neither of a GPU, nor outside of a thread's registers."""

    def compiled(limit):
        def loss(x, up, down):
            y = ops.gated_mlp(x, None, up, up, down, limit=limit, implementation="triton")
            return jnp.sum(y.astype(jnp.float32))

        shapes = (4, 2048, 2048), (2048, 5632), (5632, 2048)
        return compiled_for_four(jax.grad(loss, (0, 1, 2)), *((shape, WHOLE) for shape in shapes))

    without, limited = map(compiled, (None, 10.0))
    assert kernel_calls(limited) == kernel_calls(without)
    bytes_of = [p.memory_analysis().temp_size_in_bytes for p in (without, limited)]
    assert bytes_of[1] <= bytes_of[0]
    assert xla_reads(limited.as_text(), r"\[4,2048,5632\]") == []
    assert {spilled_bytes(ptx, tmp_path) for ptx in kernels(limited)} == {0}


@pytest.mark.parametrize("rows", [WHOLE, P("x")], ids=["everywhere", "one on each GPU"])
def test_products_with_a_single_row_or_column_compile(rows):
    """A vector has no FP8 product; and where the program has four rows, a GPU of four has one."""
    shapes = [((1 if rows == WHOLE else 4, k), (k, n)) for k, n in ((256, 128), (1, 128), (256, 1))]

    def loss(*operands):
        pairs = zip(operands[::2], operands[1::2], strict=True)
        products = [ops.linear(x, w, precision=coat.COAT) for x, w in pairs]
        return sum(jnp.sum(y.astype(jnp.float32)) for y in products)

    arrays = [array for x, w in shapes for array in ((x, rows), (w, WHOLE))]
    compiled_for_four(jax.value_and_grad(loss, argnums=range(6)), *arrays)


@pytest.mark.parametrize("packed", [True, False])
def test_attention_of_an_odd_length_runs_once_forward_and_once_backward(packed):
    """cuDNN takes no odd length; in all three precisions the forward pass is the same."""

    def loss(q, weight):
        segments = jnp.cumsum(jnp.ones((2, 19), jnp.int32), axis=1) // 7
        how = {"segments": segments} if packed else {"causal": False}
        outputs = (
            ops.attention_linear(q, q, q, weight, precision=precision, backend="cudnn", **how)
            for precision in (coat.BF16, coat.COAT, coat.COAT_LEAN)
        )
        return sum(jnp.sum(y.astype(jnp.float32)) for y in outputs)

    arrays = ((2, 19, 2, 64), WHOLE), ((128, 128), WHOLE)
    program = compiled_for_four(jax.grad(loss, argnums=(0, 1)), *arrays).as_text()
    calls = re.findall(r'custom_call_target="__cudnn\$fmha\w*?(Backward)?"', program)
    assert calls.count("Backward") == 3
    assert calls.count("") == 1


ROWS, TOKENS, COLUMNS = P("x"), P(None, "x"), P(None, None, "x")


@pytest.mark.parametrize(
    ("width", "hidden", "block", "exact", "spec"),
    [
        pytest.param(256, 768, 16, True, TOKENS, id="six times 128, tokens"),
        pytest.param(256, 768, 16, False, COLUMNS, id="six times 128, rounded, columns"),
        pytest.param(16, 16, 16, True, COLUMNS, id="a single block, columns"),
        pytest.param(128, 256, 128, True, COLUMNS, id="blocks of 128, columns"),
        pytest.param(32, 48, 16, False, ROWS, id="nothing divides, rounded, rows"),
        pytest.param(32, 48, 16, True, COLUMNS, id="nothing divides, columns"),
    ],
)
def test_every_width_compiles_on_a_mesh(width, hidden, block, exact, spec):
    """Whatever is cut: texts, their tokens, or columns; and weights as tensor parallelism does."""
    precision = dataclasses.replace(coat.COAT, block=block, exact_forward=exact)

    def loss(x, scale, up, down):
        norm = ops.Norm(scale)
        y = ops.gated_mlp(x, norm, up, up, down, precision=precision, implementation="triton")
        return jnp.sum(y.astype(jnp.float32))

    compiled_for_four(
        jax.grad(loss, argnums=(0, 1, 2, 3)),
        ((4, 64, width), spec),
        ((width,), WHOLE),
        ((width, hidden), P(None, "x")),
        ((hidden, width), P("x")),
    )


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
