"""A grid of the stability study, compiled for an H100: cuDNN's attention, and no Triton kernel.

XLA takes over 10 seconds for the step of many runs at once.
"""

from functools import partial

import hopper
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.hopper import OPTIONS, hopper_mesh, there
from experiments.stability import training
from experiments.stability.arms import ARMS, SIZES

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not hopper.can_compile_for_hopper(), reason="needs XLA's CUDA plugin"),
]


@pytest.mark.costly
def test_a_grid_compiles_for_a_gpu():
    size = SIZES["tiny"]
    mesh = hopper_mesh((1,), ("x",))
    placed = NamedSharding(mesh, PartitionSpec())
    on_gpu = partial(
        jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placed)
    )
    with there(), jax.set_mesh(mesh):
        program = training.program_of(ARMS["coat_lean"], size, size.settings)
        seeds = on_gpu(jax.ShapeDtypeStruct((3,), np.uint32))
        states = on_gpu(jax.eval_shape(program.init, seeds))
        rates = on_gpu(jax.ShapeDtypeStruct((3,), np.float32))
        text = on_gpu(jax.ShapeDtypeStruct((4096,), np.uint8))
        first = on_gpu(jax.ShapeDtypeStruct((), np.int32))
        step = jax.jit(program.step, donate_argnums=0)
        compiled = step.lower(states, text, seeds, rates, first).compile(compiler_options=OPTIONS)
    assert "__cudnn$fmha" in compiled.as_text()
    assert hopper.kernel_calls(compiled) == 0
