"""A step of compress as compiled for Hopper: two kernels for each moment, and XLA between them."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("jax_triton")
from hopper import (
    can_compile_for_hopper,
    collectives,
    copies,
    kernel_calls,
    kernels,
    spilled_bytes,
)
from test_adam_compiled import LAYOUTS
from test_adam_compiled import compile_step as compile_adamw

import coat_jax as coat
from experiments.hopper import compile_for, hopper_mesh

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not can_compile_for_hopper(), reason="needs XLA's CUDA plugin"),
]

REPLICATED = P()
MOMENTUM = optax.sgd(1e-3, momentum=0.9)


def compile_step(mesh, shapes, spec=REPLICATED, tx=MOMENTUM, implementation="triton", storage=None):
    """A step of in_place(compress(tx)) on BF16 parameters, all but gradients donated."""
    optimizer = coat.optax.in_place(
        coat.optax.compress(tx, implementation=implementation, storage=storage)
    )
    params = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape in shapes
    ]
    with jax.set_mesh(mesh):
        state = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            jax.eval_shape(optimizer.init, params),
            coat.optax.state_shardings(optimizer, params),
        )
    return compile_for(mesh, optimizer.step, params, params, state, donate_argnums=(0, 2))


def entry(compiled):
    """The operations of a program on arrays of two axes, without what only names their results."""
    text = compiled.as_text()
    lines = text[text.index("\nENTRY ") :].splitlines()[2:]
    arrays = [line for line in lines if re.search(r"= \(?\w+\[\d+,\d+", line)]
    return [
        line
        for line in arrays
        if not re.search(r" (parameter|get-tuple-element|bitcast|tuple)\(", line)
    ]


@pytest.mark.parametrize("tx", [MOMENTUM, optax.lion(1e-4, weight_decay=0.1)], ids=["sgd", "lion"])
def test_a_step_is_a_kernel_that_reads_one_pass_of_xla_and_a_kernel_that_rewrites(tx):
    compiled = compile_step(hopper_mesh((1,), ("x",)), [(4096, 4096)], tx=tx)
    read, update, rewrite = entry(compiled)
    assert "triton_kernel_call" in read
    assert " fusion(" in update
    assert "triton_kernel_call" in rewrite
    entries = [re.search(r"\.entry (\w+)\(", ptx)[1] for ptx in kernels(compiled)]
    assert entries == ["read_moment", "rewrite_moment"]


@pytest.mark.parametrize("arrays", [1, 4])
@pytest.mark.parametrize("tx", [MOMENTUM, optax.lion(1e-4)], ids=["sgd", "lion"])
def test_a_step_needs_one_decoded_moment_of_memory(tx, arrays):
    """XLA alone has those of all arrays at once, and masks."""
    mesh, size = hopper_mesh((1,), ("x",)), 4096**2
    shapes = [(4096, 4096)] * arrays
    with_kernels, by_xla = (
        compile_step(mesh, shapes, tx=tx, implementation=implementation).memory_analysis()
        for implementation in ("triton", "xla")
    )
    assert 4 * size <= with_kernels.temp_size_in_bytes <= 4 * size + 16384
    assert by_xla.temp_size_in_bytes > (4 * arrays + 1) * size
    assert with_kernels.output_size_in_bytes - with_kernels.alias_size_in_bytes <= 512


def test_every_moment_has_two_kernels():
    mesh = hopper_mesh((1,), ("x",))
    assert kernel_calls(compile_step(mesh, [(256, 512), (300, 300)])) == 4
    assert kernel_calls(compile_step(mesh, [(256, 512)], tx=optax.adamw(1e-3))) == 4
    # Too small for 8 bits, and too narrow.
    assert kernel_calls(compile_step(mesh, [(4096,), (8192, 8)])) == 0


@pytest.mark.parametrize(("mesh_shape", "names", "shape", "spec"), LAYOUTS)
def test_sharded_step_is_in_place_and_communicates_nothing(mesh_shape, names, shape, spec):
    mesh = hopper_mesh(mesh_shape, names)
    compiled = compile_step(mesh, [shape], spec)
    memory = compiled.memory_analysis()
    assert kernel_calls(compiled) == 2
    assert collectives(compiled) == []
    assert copies(compiled) == 0
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 256


@pytest.mark.parametrize("compile_step", [compile_step, compile_adamw], ids=["compress", "adamw"])
def test_an_explicit_mesh_is_as_good_as_an_automatic_one(compile_step):
    devices = hopper_mesh((4,), ("x",)).devices
    temporary = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = Mesh(devices, ("x",), axis_types=(kind,))
        spec = P("x", None)
        compiled = compile_step(
            mesh, [(4096, 4096)], spec if compile_step is not compile_adamw else [spec]
        )
        assert kernel_calls(compiled) in (1, 2)
        assert collectives(compiled) == []
        assert copies(compiled) == 0
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("shape", [(4096, 4096), (512, 300)], ids=["even", "uneven"])
@pytest.mark.parametrize("stochastic", [True, False])
def test_the_kernels_spill_no_registers(shape, stochastic, tmp_path):
    storage = coat.Storage(stochastic=stochastic)
    compiled = compile_step(hopper_mesh((1,), ("x",)), [shape], storage=storage)
    for ptx in kernels(compiled):
        assert spilled_bytes(ptx, tmp_path) == 0


def test_arrays_are_read_and_written_16_bytes_at_a_time():
    """A thread has 16 neighbours: 16 bytes of codes, and four times 16 bytes of FP32."""
    read, rewrite = kernels(compile_step(hopper_mesh((1,), ("x",)), [(4096, 4096)]))
    counts = [
        [len(re.findall(rf"{kind}\.global[\w.:]*\.v4\.b32", ptx)) for kind in ("ld", "st")]
        for ptx in (read, rewrite)
    ]
    assert counts == [[1, 4], [5, 1]]
