"""A kernel that was compiled before is launched without compiling it again."""

import os

import jax
import jax.numpy as jnp
import pytest
from hopper import COMPILED
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
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
