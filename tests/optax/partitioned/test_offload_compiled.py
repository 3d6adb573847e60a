"""A step whose state is in host memory, compiled for Hopper: what is on the device, and when."""

import re

import jax
import jax.numpy as jnp
import pytest
from hopper import COMPILED, collectives, compile_step_in_place, kernel_calls, timeline
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.optax.states.host_memory import COPIES_AT_ONCE
from experiments.hopper import compile_for, hopper_mesh, there

pytestmark = COMPILED

SHAPE = (8192, 8192)  # of which one makes a part


def compile_step(parameters, gpus=1, how="nearest"):
    """The step on as many parameters, all but gradients donated."""
    mesh = hopper_mesh((gpus,), ("fsdp",))
    rows = NamedSharding(mesh, P("fsdp"))
    optimizer = coat.optax.in_host_memory(
        coat.optax.in_place(coat.optax.fp8_adamw(1e-3, implementation="triton"), round_params=how)
    )
    params = [jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=rows)] * parameters
    with there():
        shardings = coat.optax.state_shardings(optimizer, params)
        return compile_step_in_place(
            mesh,
            optimizer,
            params,
            out_shardings=([rows] * parameters, shardings),
            compiler_options=COPIES_AT_ONCE,
        )


@pytest.mark.parametrize("how", ["nearest", "24_bits"])
def test_two_parts_of_six_are_on_the_device(how):
    part = SHAPE[0] * SHAPE[1] * (3 if how == "24_bits" else 2)
    used = compile_step(6, how=how).memory_analysis()
    # Two parts, and at most half a one for which XLA finds no place between them.
    assert used.temp_size_in_bytes < 2.6 * part
    assert used.host_alias_size_in_bytes == used.host_argument_size_in_bytes == 6 * part
    assert used.host_temp_size_in_bytes == 0


def test_a_part_comes_while_the_one_before_goes():
    found = timeline(compile_step(4))
    assert found[:5] == ["+to device", "+to device", "-to device", "-to device", "kernel"]
    for part in (found[5:14], found[14:23], found[23:32]):
        assert sorted(part[:4]) == ["+to device", "+to device", "+to host", "+to host"]
        assert sorted(part[4:]) == ["-to device", "-to device", "-to host", "-to host", "kernel"]
        assert part[-1] == "kernel"
    assert found[32:] == ["+to host", "+to host", "-to host", "-to host"]


def test_each_gpu_moves_its_own_shard():
    program = compile_step(4, gpus=4)
    used = program.memory_analysis()
    assert used.host_argument_size_in_bytes == 2 * SHAPE[0] * SHAPE[1]
    assert kernel_calls(program) == 4
    assert collectives(program) == []


def test_copies_for_a_checkpoint_take_one_array_of_the_device():
    from coat_jax.optax.states import host_memory

    mesh = hopper_mesh((1,), ("x",))
    with there():
        from coat_jax.optax.states import sharding

        on_host = sharding.host_sharding(NamedSharding(mesh, P()))
        arrays = [jax.ShapeDtypeStruct(SHAPE, jnp.int8, sharding=on_host)] * 8
        program = compile_for(
            mesh, host_memory._through_device, arrays, out_shardings=[on_host] * 8
        )
    used = program.memory_analysis()
    assert used.temp_size_in_bytes < 1.1 * SHAPE[0] * SHAPE[1]
    assert used.host_output_size_in_bytes - used.host_alias_size_in_bytes >= 8 * 2**26
    assert len(re.findall(r"copy-start\(", program.as_text())) == 16
