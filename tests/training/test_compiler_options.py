"""Options of XLA and CUDA: which runs have which, and that XLA knows them."""

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import can_compile_for_hopper, hopper_mesh
from train_cases import small

from coat_jax import nvidia
from coat_jax.optax.states.host_memory import COPIES_AT_ONCE
from coat_jax.training.compiler_options import (
    COMMUNICATION,
    NO_TRITON_GEMM,
    QUEUES,
    compiler_options,
    use_one_queue,
)


@pytest.mark.parametrize(
    ("precision", "platform", "size", "offload", "flags", "options"),
    [
        ("coat", "gpu", 1, False, "", NO_TRITON_GEMM),
        ("fp8_linear", "gpu", 1, False, "", NO_TRITON_GEMM),
        ("coat_int8", "gpu", 1, False, "", NO_TRITON_GEMM),
        ("coat", "cpu", 2, True, "", {}),
        ("bf16", "gpu", 1, False, "", {}),
        ("bf16", "gpu", 4, False, "", COMMUNICATION),
        ("bf16", "gpu", 1, True, "", COPIES_AT_ONCE),
        ("coat", "gpu", 1, False, "--other=1 --xla_gpu_enable_triton_gemm=true", {}),
    ],
)
def test_a_run_has_the_options_of_its_devices_and_precision(
    precision, platform, size, offload, flags, options, monkeypatch
):
    """An option in XLA_FLAGS is left alone."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    config = small(model={"precision": precision}, optimizer={"offload": offload})
    devices = np.array([SimpleNamespace(platform=platform)])
    assert compiler_options(config, SimpleNamespace(devices=devices, size=size)) == options


@pytest.mark.compiled
@pytest.mark.skipif(not can_compile_for_hopper(), reason="needs XLA's CUDA plugin")
@pytest.mark.parametrize("name", COMMUNICATION)
def test_xla_knows_each(name):
    """An option that XLA has dropped would end every run on several GPUs."""
    mesh = hopper_mesh((4,), ("x",))
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        x = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=sharding)
        options = {name: COMMUNICATION[name]}
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
