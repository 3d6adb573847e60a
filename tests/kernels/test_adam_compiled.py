"""The fused AdamW step as compiled for Hopper: in place, in one pass, and without communication."""

import functools
import re

import jax
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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.kernels import adam_launch
from coat_jax.kernels.adam import adam_reference
from coat_jax.numerics import noise
from experiments.hopper import hopper_mesh

pytestmark = COMPILED


def structs(mesh, shapes, specs, dtype=jnp.bfloat16):
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]


def compile_step(
    mesh, shapes, specs, dtype=jnp.float32, learning_rate=1e-3, how="nearest", **arguments
):
    adamw = coat.optax.fp8_adamw(
        learning_rate, weight_decay=0.1, implementation="triton", **arguments
    )
    optimizer = coat.optax.in_place(adamw, round_params=how)
    params, grads = (structs(mesh, shapes, specs, kind) for kind in (dtype, jnp.bfloat16))
    return compile_step_in_place(mesh, optimizer, params, grads)


def compile_replicated(shapes, **arguments):
    return compile_step(hopper_mesh((4,), ("x",)), shapes, [P()] * len(shapes), **arguments)


LARGE, MANY_SMALL = ((4096, 4096),), ((128, 256),) * 24


@functools.cache
def corrected(shapes):
    """A step of BF16 parameters with corrections."""
    return compile_replicated(shapes, dtype=jnp.bfloat16, how="24_bits")


@functools.cache
def uncorrected():
    return compile_replicated(LARGE, dtype=jnp.bfloat16)


# Meshes, and the shapes and shardings of parameters on them.
LAYOUTS = [
    pytest.param(
        (4,),
        ("a",),
        [(4096, 4096), (4096, 2048), (512, 300)],  # the last one has uneven rows
        [P("a"), P(None, "a"), P("a")],
        id="one axis",
    ),
    pytest.param(
        (2, 2),
        ("a", "b"),
        [(4096, 4096), (2048, 4096), (8, 512, 1024), (2048, 2048)],
        [P("a", "b"), P(("a", "b")), P(None, "a", "b"), P("a")],
        id="two axes",
    ),
]


def test_temporary_memory_does_not_grow_with_the_parameters():
    small = compile_replicated([(1024, 1024)], dtype=jnp.bfloat16).memory_analysis()
    large = uncorrected().memory_analysis()
    assert large.temp_size_in_bytes == small.temp_size_in_bytes <= 1024


def test_the_chain_stores_nothing_but_the_update():
    """FP32 updates of BF16 gradients: a copy of the gradients in FP32 would be as large again."""
    mesh = hopper_mesh((1,), ("x",))
    tx = coat.optax.fp8_adamw(1e-3, weight_decay=0.1, implementation="triton")

    def step(params, grads, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, grads = (structs(mesh, LARGE, [P()], kind) for kind in (jnp.float32, jnp.bfloat16))
    optimizer = coat.optax.InPlaceOptimizer(tx.init, step)
    compiled = compile_step_in_place(mesh, optimizer, params, grads)
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * 4096 * 4096 + 2048


def test_state_is_at_most_2_09_bytes_a_parameter_and_a_correction_one_more():
    """Parameter, correction, gradient in BF16, moments: 7.1."""
    sizes = [
        compiled.memory_analysis().argument_size_in_bytes / 4096**2
        for compiled in (uncorrected(), corrected(LARGE))
    ]
    assert sizes[0] <= 2 + 2 + 2.09
    assert sizes[1] - sizes[0] == pytest.approx(1, abs=1e-4)


def test_small_leaves_share_launches():
    assert kernel_calls(compile_replicated(MANY_SMALL)) == 3
    assert kernel_calls(corrected(MANY_SMALL)) == 3


def test_fp32_leaves_of_a_shape_are_traced_and_compiled_once_without_the_kernel(monkeypatch):
    """The numbers of leaves, which seed their rounding, are operands: programs do not differ."""
    traced = []

    def reference(leaf, *arguments):
        traced.append(leaf.grad.shape)
        return adam_reference(leaf, *arguments)

    monkeypatch.setattr(adam_launch, "adam_reference", reference)
    shapes = [(4096,), (96,), (4096,), (4096,)]
    compiled = compile_replicated(
        shapes, dtype=jnp.bfloat16, how="stochastic", learning_rate=0.0123
    )
    assert sorted(traced) == [(96,), (4096,)]
    assert kernel_calls(compiled) == 0
    program = compiled.as_text()
    for leaf in noise.leaf_ids([0] * len(shapes)):
        constant = f"u32[] constant({leaf * noise.GOLDEN & 0xFFFF_FFFF})"
        assert constant in program
        assert constant not in program.partition("\nENTRY")[0]


@pytest.mark.parametrize(
    ("shape", "spec", "gathers"),
    [
        # 384 columns on 4 devices: 96 each, where a group has 128.
        ((512, 384), P(None, "fsdp"), True),
        ((4096, 128), P("fsdp"), False),
        ((4096, 128), P(None, "fsdp"), True),
    ],
    ids=str,
)
def test_only_an_axis_sharded_inside_a_group_is_gathered(shape, spec, gathers):
    compiled = compile_step(hopper_mesh((4,), ("fsdp",)), [shape], [spec])
    assert kernel_calls(compiled) == 1
    assert ("all-gather" in collectives(compiled)) == gathers


def test_schedule_and_rounding_add_no_pass_over_memory():
    compiled = compile_step(
        hopper_mesh((4,), ("fsdp",)),
        LARGE,
        [P("fsdp")],
        dtype=jnp.bfloat16,
        learning_rate=lambda count: 1e-3 / (1 + count),
        how="stochastic",
        nesterov=True,
    )
    assert kernel_calls(compiled) == 1
    assert copies(compiled) == 0
    assert compiled.memory_analysis().temp_size_in_bytes <= 2048


@pytest.mark.parametrize(
    ("name", "shapes", "most"), [("leaf", LARGE, 0), ("bucket", MANY_SMALL, 8)]
)
def test_the_kernels_for_corrections_spill_no_registers(name, shapes, most, tmp_path):
    """But one pointer in that for eight leaves, with which ptxas fits more programs on a core."""
    ptx, *_ = kernels(corrected(shapes))
    assert f".entry step_corrected_{name}(" in ptx
    assert spilled_bytes(ptx, tmp_path) <= most


def test_corrections_are_read_and_written_16_at_a_time():
    """A thread has 16 neighbours: one more load and one more store of 16 bytes."""
    found = [
        [len(re.findall(rf"{kind}\.global[\w.:]*\.v4\.b32", ptx)) for kind in ("ld", "st")]
        for ptx in (kernels(compiled)[0] for compiled in (uncorrected(), corrected(LARGE)))
    ]
    assert found == [[6, 4], [7, 5]]
