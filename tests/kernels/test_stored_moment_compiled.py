"""A step of compress as compiled for Hopper: two kernels for each moment, and XLA between them."""

import functools
import re

import jax.numpy as jnp
import optax
import pytest
from hopper import (
    COMPILED,
    collectives,
    compile_step_in_place,
    copies,
    kernel_calls,
    kernels,
    spilled_bytes,
)
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from test_adam_compiled import LAYOUTS, structs
from test_adam_compiled import compile_step as compile_adamw

import coat_jax as coat
from experiments.hopper import hopper_mesh

pytestmark = COMPILED

MOMENTUM = optax.sgd(1e-3, momentum=0.9)
LION = optax.lion(1e-4, weight_decay=0.1)


def compile_step(mesh, shapes, specs=None, tx=MOMENTUM, implementation="triton", storage=None):
    """A step of in_place(compress(tx)) on BF16 parameters, all but gradients donated."""
    optimizer = coat.optax.in_place(
        coat.optax.compress(tx, implementation=implementation, storage=storage)
    )
    specs = [P()] * len(shapes) if specs is None else specs
    return compile_step_in_place(mesh, optimizer, structs(mesh, shapes, specs))


@functools.cache
def alone(tx=MOMENTUM, arrays=1, implementation="triton"):
    """The step of some large arrays on one GPU."""
    shapes = [(4096, 4096)] * arrays
    return compile_step(hopper_mesh((1,), ("x",)), shapes, tx=tx, implementation=implementation)


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


@pytest.mark.parametrize("tx", [MOMENTUM, LION], ids=["sgd", "lion"])
def test_a_step_is_a_kernel_that_reads_one_pass_of_xla_and_a_kernel_that_rewrites(tx):
    read, update, rewrite = entry(alone(tx))
    assert "triton_kernel_call" in read
    assert " fusion(" in update
    assert "triton_kernel_call" in rewrite
    entries = [re.search(r"\.entry (\w+)\(", ptx)[1] for ptx in kernels(alone(tx))]
    assert entries == ["read_moment", "rewrite_moment"]


@pytest.mark.parametrize(
    ("tx", "arrays"), [(MOMENTUM, 1), (MOMENTUM, 4), (LION, 1)], ids=["sgd", "four", "lion"]
)
def test_a_step_needs_one_decoded_moment_of_memory(tx, arrays):
    """XLA alone has those of all arrays at once, and masks."""
    size = 4096**2
    with_kernels, by_xla = (
        alone(tx, arrays, implementation).memory_analysis() for implementation in ("triton", "xla")
    )
    assert 4 * size <= with_kernels.temp_size_in_bytes <= 4 * size + 16384
    assert by_xla.temp_size_in_bytes > (4 * arrays + 1) * size
    assert with_kernels.output_size_in_bytes - with_kernels.alias_size_in_bytes <= 512


def test_every_moment_has_two_kernels():
    mesh = hopper_mesh((1,), ("x",))
    # The last two are too small for 8 bits, and too narrow.
    shapes = [(256, 512), (300, 300), (4096,), (8192, 8)]
    assert kernel_calls(compile_step(mesh, shapes, tx=optax.adamw(1e-3))) == 8


CORRECTED = functools.partial(compile_adamw, dtype=jnp.bfloat16, how="24_bits")
SHARDED = {"adamw": (compile_adamw, 1), "corrected": (CORRECTED, 1), "compress": (compile_step, 2)}


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize(("mesh_shape", "names", "shapes", "specs"), LAYOUTS)
def test_sharded_step_is_in_place_and_communicates_nothing(name, mesh_shape, names, shapes, specs):
    """Also where rows are uneven, replicated over an axis, or sharded over two."""
    compile_sharded, kernels_of_a_leaf = SHARDED[name]
    compiled = compile_sharded(hopper_mesh(mesh_shape, names), shapes, specs)
    memory = compiled.memory_analysis()
    assert kernel_calls(compiled) == kernels_of_a_leaf * len(shapes)
    assert collectives(compiled) == []
    assert copies(compiled) == 0
    if name != "compress":  # each leaf's scalars, each device's place, XLA's table of results
        assert memory.temp_size_in_bytes <= 1024 * len(shapes)
    # The tuple of pointers.
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 512


@pytest.mark.parametrize("compile_step", [compile_step, compile_adamw], ids=["compress", "adamw"])
def test_an_explicit_mesh_is_as_good_as_an_automatic_one(compile_step):
    devices = hopper_mesh((4,), ("x",)).devices
    temporary = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = Mesh(devices, ("x",), axis_types=(kind,))
        compiled = compile_step(mesh, [(4096, 4096)], [P("x", None)])
        assert kernel_calls(compiled) in (1, 2)
        assert collectives(compiled) == []
        assert copies(compiled) == 0
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("stochastic", [True, False])
def test_the_kernels_spill_no_registers(stochastic, tmp_path):
    """Neither those for whole groups nor those for a short last one."""
    shapes, storage = [(4096, 4096), (512, 300)], coat.Storage(stochastic=stochastic)
    compiled = compile_step(hopper_mesh((1,), ("x",)), shapes, storage=storage)
    assert [spilled_bytes(ptx, tmp_path) for ptx in kernels(compiled)] == [0] * 4


def test_arrays_are_read_and_written_16_bytes_at_a_time():
    """A thread has 16 neighbours: 16 bytes of codes, and four times 16 bytes of FP32."""
    counts = [
        [len(re.findall(rf"{kind}\.global[\w.:]*\.v4\.b32", ptx)) for kind in ("ld", "st")]
        for ptx in kernels(alone())
    ]
    assert counts == [[1, 4], [5, 1]]
