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


@pytest.mark.parametrize(
    ("capabilities", "given", "offload", "queues"),
    [
        (["9.0", "9.0"], None, False, "1"),
        (["9.0"], "4", False, "4"),  # a variable that is set is left as it is
        (["9.0"], None, True, None),
        ([], None, False, None),
        (["8.9"], None, False, None),
        (["9.0", "10.0"], None, False, None),
    ],
)
def test_hoppers_have_one_queue(capabilities, given, offload, queues, monkeypatch):
    monkeypatch.setattr(nvidia, "query_gpus", {"compute_cap": capabilities}.get)
    monkeypatch.setenv(QUEUES, given or "")
    if given is None:
        monkeypatch.delenv(QUEUES)
    use_one_queue(offload=offload)
    assert os.environ.get(QUEUES) == queues
