"""Options for communication: where they hold, and that XLA knows them."""

import os

import jax
import jax.numpy as jnp
import pytest
from hopper import can_compile_for_hopper, hopper_mesh

from coat_jax import nvidia
from coat_jax.training.cluster.communication import (
    OPTIONS,
    QUEUES,
    communication_options,
    use_one_queue,
)

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
@pytest.mark.parametrize("name", OPTIONS)
def test_xla_knows_each(name):
    """An option that XLA has dropped would end every run on several GPUs."""
    mesh = hopper_mesh((4,), ("x",))
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        x = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=sharding)
        options = {name: OPTIONS[name]}
        jax.jit(lambda x: x.sum(), compiler_options=options).lower(x).compile()


@pytest.fixture
def queues(monkeypatch):
    """CUDA's variable after `use_one_queue` on a machine with GPUs of these capabilities."""

    def after(*capabilities, given=None, **options):
        monkeypatch.setattr(nvidia, "query_gpus", {"compute_cap": [*capabilities]}.get)
        monkeypatch.setenv(QUEUES, given or "")
        if given is None:
            monkeypatch.delenv(QUEUES)
        use_one_queue(**options)
        return os.environ.get(QUEUES)

    return after


def test_hoppers_have_one_queue(queues):
    assert queues("9.0", "9.0") == "1"
    assert queues("9.0", given="4") == "4", "a variable that is set is left as it is"
    assert queues("9.0", offload=True) is None


@pytest.mark.parametrize("capabilities", [[], ["8.9"], ["10.0", "10.0"], ["9.0", "10.0"]])
def test_other_machines_keep_cudas_queues(queues, capabilities):
    assert queues(*capabilities) is None
