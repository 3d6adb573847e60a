"""A kernel that was compiled before, by any process, is launched without compiling it again."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hopper import COMPILED
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax import ops
from coat_jax.kernels.cast import cast
from coat_jax.kernels.kernel_cache import read, write
from experiments.hopper import hopper_mesh, there

pytestmark = COMPILED


@pytest.fixture
def folder(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "triton"
    jax.config.update("jax_compilation_cache_dir", before)


def lowered(rows=256, dtype=coat.E4M3):
    """The rounding of a matrix, as it is handed to XLA's compiler."""
    with there():
        mesh = hopper_mesh((1,), ("x",))
        whole = NamedSharding(mesh, P())
        x = jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16, sharding=whole)
        scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        with jax.set_mesh(mesh):
            jitted = jax.jit(lambda x, scale: cast(x, scale, dtype, "both"))
            return jitted.lower(x, scale).as_text()


def test_the_second_time_nothing_is_compiled(folder, monkeypatch):
    """And a kernel is launched by the call that a CUDA graph can contain."""
    program = lowered()
    assert len(list(folder.iterdir())) == 1
    assert program.count("@triton_kernel_call_ffi(") == 1
    assert "@triton_kernel_call(" not in program

    def compile_again(*arrays, **call):
        raise AssertionError("compiled again")

    monkeypatch.setattr("jax_triton.triton_call", compile_again)
    assert lowered() == program
    for other in ({"rows": 512}, {"dtype": coat.E5M2}):
        with pytest.raises(AssertionError, match="compiled again"):
            lowered(**other)


def test_a_truncated_file_is_written_again(folder):
    program = lowered()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for length in (0, 31, -1):
        path.write_bytes(whole[:length])
        assert lowered() == program
        assert path.read_bytes() == whole


def test_without_a_cache_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lowered()
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_no_file_and_does_no_harm(tmp_path, monkeypatch):
    def fail(self, target):
        raise OSError("No space left on device")

    in_the_way = tmp_path / "file"
    in_the_way.write_bytes(b"")
    write(in_the_way / "kernel", b"configuration")
    assert read(in_the_way / "kernel") is None
    monkeypatch.setattr(type(tmp_path), "replace", fail)
    write(tmp_path / "kernel", b"compiled")
    assert list(tmp_path.iterdir()) == [in_the_way]


def test_others_may_read_a_file_if_the_umask_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        write(tmp_path / "kernel", b"compiled")
    finally:
        os.umask(before)
    assert (tmp_path / "kernel").stat().st_mode & 0o777 == 0o644


# --- Kernels are named after what they compute, in every process alike -------------------------

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = re.compile(r'backend_config = "\d+"')


@functools.cache
def lowered_mlp(activation="silu"):
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
    silu, gelu = lowered_mlp("silu"), lowered_mlp("gelu")
    assert names(silu) != names(gelu)
    assert re.sub(r"kernel_[0-9a-f]{16}", "", silu) == re.sub(r"kernel_[0-9a-f]{16}", "", gelu)


def test_the_program_is_the_same_in_every_process():
    source = "import test_kernel_cache_compiled as test; print(test.lowered_mlp())"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    other = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == lowered_mlp().strip()
