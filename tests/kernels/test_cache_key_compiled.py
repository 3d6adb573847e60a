"""Partitioned kernels are named after what they compute, in every process alike."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from hopper import COMPILED
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import ops
from experiments.hopper import hopper_mesh, there

pytestmark = COMPILED

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = re.compile(r'backend_config = "\d+"')


@functools.cache
def lowered(activation="silu"):
    """The gradient of an MLP for four GPUs, as it is handed to the compiler."""

    def loss(x, up, down):
        y = ops.mlp(x, None, up, down, activation=activation, implementation="triton")
        return jnp.sum(y.astype(jnp.float32))

    def array(*shape, axes=()):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))

    with there():
        mesh = hopper_mesh((4,), ("x",))
        args = array(4, 128, 256, axes="x"), array(256, 512), array(512, 256)
        with jax.set_mesh(mesh):
            text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).as_text()
    assert "CustomSPMDPartitioning" in text
    return ADDRESS.sub("", text)


def names(text):
    return set(re.findall(r"@(kernel_[0-9a-f]{16})", text))


def test_programs_that_differ_in_a_kernel_only_differ_in_its_name():
    """Without the address nothing else in the program says which activation it is."""
    silu, gelu = lowered("silu"), lowered("gelu")
    assert names(silu) != names(gelu)
    assert re.sub(r"kernel_[0-9a-f]{16}", "", silu) == re.sub(r"kernel_[0-9a-f]{16}", "", gelu)


def test_the_program_is_the_same_in_every_process():
    source = "import test_cache_key_compiled as test; print(test.lowered())"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    other = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == lowered().strip()
