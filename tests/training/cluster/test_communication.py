"""XLA's options on several GPUs: where they hold, and that XLA knows them."""

import jax
import jax.numpy as jnp
import pytest
from hopper import can_compile_for_hopper, hopper_mesh

from coat_jax.training.cluster.communication import OPTIONS, communication_options

needs_plugin = pytest.mark.skipif(not can_compile_for_hopper(), reason="needs XLA's CUDA plugin")


def test_other_devices_have_none():
    assert communication_options(jax.make_mesh((2,), ("x",))) == {}


@pytest.mark.compiled
@needs_plugin
@pytest.mark.parametrize(("gpus", "options"), [(1, {}), (4, OPTIONS)])
def test_several_gpus_have_all(gpus, options):
    assert communication_options(hopper_mesh((gpus,), ("x",))) == options


@pytest.mark.compiled
@needs_plugin
def test_options_in_xla_flags_are_left_alone(monkeypatch):
    name = "xla_gpu_enable_latency_hiding_scheduler"
    monkeypatch.setenv("XLA_FLAGS", f"--other=1 --{name}=false")
    assert communication_options(hopper_mesh((4,), ("x",))).keys() == OPTIONS.keys() - {name}


@pytest.mark.compiled
@needs_plugin
@pytest.mark.parametrize("name", OPTIONS)
def test_xla_knows_each(name):
    """An option that XLA has dropped would end every run on several GPUs."""
    mesh = hopper_mesh((4,), ("x",))
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        x = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=sharding)
        options = {name: OPTIONS[name]}
        jax.jit(lambda x: x.sum(), compiler_options=options).lower(x).compile()
