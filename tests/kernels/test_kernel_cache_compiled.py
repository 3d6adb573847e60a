"""A kernel that was compiled before is launched without compiling it again."""

import os
import re
import sys
import types
import zlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("jax_triton")
from hopper import can_compile_for_hopper

import coat_jax as coat
from coat_jax.kernels.cast import cast
from coat_jax.kernels.kernel_cache import read, write
from experiments.hopper import hopper_mesh, there

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not can_compile_for_hopper(), reason="needs XLA's CUDA plugin"),
]


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
    program = lowered()
    assert len(list(folder.iterdir())) == 1

    def compile_again(*arrays, **call):
        raise AssertionError("compiled again")

    monkeypatch.setattr("jax_triton.triton_call", compile_again)
    assert lowered() == program
    with pytest.raises(AssertionError, match="compiled again"):
        lowered(rows=512)
    with pytest.raises(AssertionError, match="compiled again"):
        lowered(dtype=coat.E5M2)


def test_compiling_a_kernel_does_not_import_torch(monkeypatch):
    """It takes seconds. Triton imports it, if it can, when it compiles the first kernel."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def import_torch(*arrays, **call):
        import torch

        return torch

    monkeypatch.setattr("jax_triton.triton_call", import_torch)
    with pytest.raises(ImportError, match="torch"):
        lowered(rows=1024)
    assert "torch" not in sys.modules


def test_torch_stays_if_another_thread_imports_it_meanwhile(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # is put back in the end
    imported = sys.modules.pop("torch")

    def import_elsewhere(*arrays, **call):
        sys.modules["torch"] = imported
        raise AssertionError("compiled")

    monkeypatch.setattr("jax_triton.triton_call", import_elsewhere)
    with pytest.raises(AssertionError, match="compiled"):
        lowered(rows=2048)
    assert sys.modules["torch"] is imported


def instructions(launch):
    """The PTX in a launch without comments, labels and debugging information."""
    ptx = re.search(rb"\.version .*?\n}", launch, re.DOTALL).group()
    lines = [line.partition(b"//")[0].strip() for line in ptx.splitlines()]
    return [line for line in lines if line and not line.startswith((b".loc", b"$L", b".file"))]


@pytest.fixture
def compiled_anew(monkeypatch):
    """No kernel is in the memory of jax-triton, and Triton's variable is not set."""
    monkeypatch.setattr("jax_triton.triton_lib._COMPILED_KERNEL_CACHE", {})
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO", raising=False)


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("variable", [None, "1", "0"])
def test_a_launch_carries_the_kernel_without_its_sources(folder, monkeypatch, variable):
    if variable is not None:
        monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", variable)
    lowered()
    (path,) = folder.iterdir()
    launch = zlib.decompress(read(path))
    assert b"tt.func" not in launch
    assert (b".loc" in launch) == (b".debug_info" in launch) == (variable == "0")
    assert os.environ.get("TRITON_DISABLE_LINE_INFO") == variable


@pytest.mark.usefixtures("compiled_anew")
def test_without_line_numbers_a_kernel_has_the_same_instructions(folder, monkeypatch):
    lowered()
    (path,) = folder.iterdir()
    without = zlib.decompress(read(path))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    monkeypatch.setattr("jax_triton.triton_lib._COMPILED_KERNEL_CACHE", {})
    lowered()
    (other,) = set(folder.iterdir()) - {path}
    with_them = zlib.decompress(read(other))
    assert len(with_them) > 1.3 * len(without)
    assert instructions(with_them) == instructions(without)
    assert len(instructions(without)) > 100


def test_a_kernel_is_launched_by_the_call_that_a_cuda_graph_can_contain():
    program = lowered()
    assert program.count("@triton_kernel_call_ffi(") == 1
    assert "@triton_kernel_call(" not in program


@pytest.mark.parametrize("length", [0, 31, 40, -1])
def test_a_truncated_file_is_written_again(folder, length):
    program = lowered()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    assert lowered() == program
    assert path.read_bytes() == whole


def test_without_a_cache_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lowered()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_does_no_harm(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_bytes(b"")
    write(in_the_way / "kernel", b"configuration")
    assert read(in_the_way / "kernel") is None


def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    def fail(self, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(type(tmp_path), "replace", fail)
    write(tmp_path / "kernel", b"compiled")
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_a_file_if_the_umask_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        write(tmp_path / "kernel", b"compiled")
    finally:
        os.umask(before)
    assert (tmp_path / "kernel").stat().st_mode & 0o777 == 0o644
