"""The fused AdamW step as compiled for Hopper: in place, in one pass, and without communication."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
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

import coat_jax as coat
from coat_jax.kernels import adam_launch
from coat_jax.kernels.adam import adam_reference
from coat_jax.numerics import noise
from experiments.hopper import compile_for, hopper_mesh

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not can_compile_for_hopper(), reason="needs XLA's CUDA plugin"),
]


def compile_step(mesh, shapes, specs, dtype=jnp.float32, learning_rate=1e-3, **arguments):
    """The fused step on parameters of these shapes and shardings, all but gradients donated."""
    optimizer = coat.optax.fused_fp8_adamw(
        learning_rate, weight_decay=0.1, implementation="triton", **arguments
    )
    params = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    grads = [jax.ShapeDtypeStruct(p.shape, jnp.bfloat16, sharding=p.sharding) for p in params]
    state = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        jax.eval_shape(optimizer.init, params),
        coat.optax.state_shardings(optimizer, params),
    )
    return compile_for(mesh, optimizer.step, params, grads, state, donate_argnums=(0, 2))


LAYOUTS = [
    pytest.param((4,), ("fsdp",), (4096, 4096), P("fsdp", None), id="rows"),
    pytest.param((4,), ("fsdp",), (4096, 4096), P(None, "fsdp"), id="columns"),
    pytest.param((2, 2), ("fsdp", "tensor"), (4096, 4096), P("fsdp", "tensor"), id="both"),
    pytest.param((2, 2), ("fsdp", "tensor"), (4096, 4096), P(("fsdp", "tensor")), id="two axes"),
    pytest.param((2, 2), ("a", "b"), (8, 512, 1024), P(None, "a", "b"), id="stacked layers"),
    pytest.param((2, 2), ("data", "fsdp"), (4096, 4096), P("fsdp"), id="replicated over data"),
    pytest.param((4,), ("fsdp",), (512, 300), P("fsdp", None), id="uneven rows"),
]


@pytest.mark.parametrize(("mesh_shape", "names", "shape", "spec"), LAYOUTS)
def test_sharded_step_is_in_place_and_communicates_nothing(mesh_shape, names, shape, spec):
    compiled = compile_step(hopper_mesh(mesh_shape, names), [shape], [spec])
    memory = compiled.memory_analysis()
    assert kernel_calls(compiled) == 1
    assert collectives(compiled) == []
    assert copies(compiled) == 0
    # The step's scalars, each device's place in the mesh, XLA's table of results.
    assert memory.temp_size_in_bytes <= 2048
    aliased = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert aliased <= 256  # the tuple of pointers


def test_temporary_memory_does_not_grow_with_the_parameters():
    mesh = hopper_mesh((4,), ("x",))
    small = compile_step(mesh, [(1024, 1024)], [P()]).memory_analysis()
    large = compile_step(mesh, [(16384, 16384)], [P()]).memory_analysis()
    assert large.temp_size_in_bytes == small.temp_size_in_bytes <= 1024


def test_the_chain_stores_nothing_but_the_update():
    """FP32 updates of BF16 gradients: a copy of the gradients in FP32 would be as large again."""
    mesh, shape = hopper_mesh((1,), ("x",)), (4096, 4096)
    whole = NamedSharding(mesh, P())
    tx = coat.optax.fp8_adamw(1e-3, weight_decay=0.1, implementation="triton")

    def step(params, grads, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, grads = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for dtype in (jnp.float32, jnp.bfloat16)
    )
    state = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole),
        jax.eval_shape(tx.init, params),
    )
    compiled = compile_for(mesh, step, params, grads, state, donate_argnums=(0, 2))
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * 4096 * 4096 + 2048


def test_state_is_at_most_2_09_bytes_a_parameter():
    state = jax.eval_shape(
        coat.optax.scale_by_fp8_adam().init, jax.ShapeDtypeStruct((16384, 16384), jnp.float32)
    )
    stored = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))
    assert stored / 2**28 <= 2.09


def test_small_leaves_share_launches():
    compiled = compile_step(hopper_mesh((4,), ("x",)), [(128, 256)] * 24, [P()] * 24)
    assert kernel_calls(compiled) == 3


def test_fp32_leaves_need_no_launch_of_the_kernel():
    compiled = compile_step(hopper_mesh((4,), ("x",)), [(4096,)] * 3, [P()] * 3)
    assert kernel_calls(compiled) == 0


def test_fp32_leaves_of_a_shape_are_traced_once(monkeypatch):
    traced = []

    def reference(leaf, *arguments):
        traced.append(leaf.grad.shape)
        return adam_reference(leaf, *arguments)

    monkeypatch.setattr(adam_launch, "adam_reference", reference)
    mesh = hopper_mesh((4,), ("x",))
    compile_step(mesh, [(4096,), (96,), (4096,), (4096,)], [P()] * 4, learning_rate=0.0123)
    assert sorted(traced) == [(96,), (4096,)]


def test_fp32_leaves_of_a_shape_are_compiled_once():
    """The numbers of leaves, which seed their rounding, are operands: kernels do not differ."""
    mesh, specs = hopper_mesh((4,), ("x",)), [P()] * 3
    rounded = {"dtype": jnp.bfloat16, "round_params": True}
    program = compile_step(mesh, [(4096,)] * 3, specs, **rounded).as_text()
    for leaf in noise.leaf_ids(specs):
        constant = f"u32[] constant({leaf * noise.GOLDEN & 0xFFFF_FFFF})"
        assert constant in program
        assert constant not in program.partition("\nENTRY")[0]


def test_an_axis_sharded_inside_a_group_is_gathered_and_still_steps():
    # 384 columns on 4 devices: 96 each, where a group has 128.
    compiled = compile_step(hopper_mesh((4,), ("fsdp",)), [(512, 384)], [P(None, "fsdp")])
    assert kernel_calls(compiled) == 1
    assert "all-gather" in collectives(compiled)


@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(None, "fsdp")], ids=str)
def test_a_last_axis_of_one_group_steps_on_a_mesh(spec):
    compiled = compile_step(hopper_mesh((4,), ("fsdp",)), [(4096, 128)], [spec])
    assert kernel_calls(compiled) == 1
    assert ("all-gather" in collectives(compiled)) == (spec == P(None, "fsdp"))


def test_schedule_and_rounding_add_no_pass_over_memory():
    compiled = compile_step(
        hopper_mesh((4,), ("fsdp",)),
        [(4096, 4096)],
        [P("fsdp")],
        dtype=jnp.bfloat16,
        learning_rate=lambda count: 1e-3 / (1 + count),
        round_params=True,
        nesterov=True,
    )
    assert kernel_calls(compiled) == 1
    assert copies(compiled) == 0
    assert compiled.memory_analysis().temp_size_in_bytes <= 2048


CORRECTED = {"dtype": jnp.bfloat16, "correct_params": True}


@pytest.mark.parametrize(("mesh_shape", "names", "shape", "spec"), [LAYOUTS[2], LAYOUTS[6]])
def test_corrections_are_sharded_and_stepped_in_place(mesh_shape, names, shape, spec):
    compiled = compile_step(hopper_mesh(mesh_shape, names), [shape], [spec], **CORRECTED)
    memory = compiled.memory_analysis()
    assert kernel_calls(compiled) == 1
    assert collectives(compiled) == []
    assert copies(compiled) == 0
    assert memory.temp_size_in_bytes <= 2048
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 256


def test_corrections_are_one_byte_of_7_1():
    """Parameter, correction, gradient in BF16, moments."""
    mesh = hopper_mesh((4,), ("x",))
    sizes = [
        compile_step(mesh, [(4096, 4096)], [P()], jnp.bfloat16, correct_params=corrects)
        .memory_analysis()
        .argument_size_in_bytes
        / 4096**2
        for corrects in (False, True)
    ]
    assert sizes[1] - sizes[0] == pytest.approx(1, abs=1e-4)
    assert sizes[1] <= 7.1


def test_small_leaves_with_corrections_share_launches():
    mesh = hopper_mesh((4,), ("x",))
    assert kernel_calls(compile_step(mesh, [(128, 256)] * 24, [P()] * 24, **CORRECTED)) == 3


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize(
    ("name", "shapes", "most"), [("leaf", [(128, 8192)], 0), ("bucket", [(128, 256)] * 8, 8)]
)
def test_the_kernels_for_corrections_spill_no_registers(name, shapes, most, rounds, tmp_path):
    """But one pointer in that for eight leaves, with which ptxas fits more programs on a core."""
    mesh = hopper_mesh((4,), ("x",))
    compiled = compile_step(mesh, shapes, [P()] * len(shapes), round_params=rounds, **CORRECTED)
    (ptx,) = kernels(compiled)
    assert f".entry step_corrected_{name}(" in ptx
    assert spilled_bytes(ptx, tmp_path) <= most


def test_corrections_are_read_and_written_16_at_a_time():
    """A thread has 16 neighbours: one more load and one more store of 16 bytes."""
    mesh = hopper_mesh((4,), ("x",))
    loads, stores = (
        [
            len(re.findall(rf"{kind}\.global[\w.:]*\.v4\.b32", kernels(compiled)[0]))
            for compiled in (
                compile_step(mesh, [(4096, 4096)], [P()], jnp.bfloat16, correct_params=corrects)
                for corrects in (False, True)
            )
        ]
        for kind in ("ld", "st")
    )
    assert loads == [6, 7]
    assert stores == [4, 5]
