"""Making a model as compiled for an H100."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hopper import can_compile_for_hopper
from jax.sharding import NamedSharding, PartitionSpec

from coat_jax import models
from experiments.hopper import compile_for, hopper_mesh

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not can_compile_for_hopper(), reason="needs XLA's CUDA plugin"),
]


def test_parameters_in_bf16_are_never_whole_in_fp32():
    """They are drawn in FP32: XLA rounds each one where it is drawn, in one kernel."""
    config = dataclasses.replace(models.config_of("llama2_7b"), param_dtype=jnp.bfloat16)
    mesh = hopper_mesh((1,), ("x",))

    def initialize(key):
        return nnx.state(models.Llama(config, rngs=nnx.Rngs(key)))

    key = jax.eval_shape(lambda: jax.random.key(0))
    key = key.update(sharding=NamedSharding(mesh, PartitionSpec()))
    memory = compile_for(mesh, initialize, key).memory_analysis()
    assert memory.output_size_in_bytes >= 2 * models.parameters_count(config)
    # A stack of gate weights would have 5.4 GiB in FP32. Counters of one layer take 0.34.
    of_one_layer = 4 * config.width * config.ffn
    assert memory.temp_size_in_bytes <= 2 * of_one_layer + 2**20
