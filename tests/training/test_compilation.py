"""Options of XLA and CUDA, and the compilation cache: a second start compiles nothing."""

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forks import Fork
from hopper import can_compile_for_hopper, hopper_mesh
from processes import outputs
from train_cases import small

from coat_jax.errors import UserError
from coat_jax.optax.states.host_memory import COPIES_AT_ONCE
from coat_jax.training import compilation
from coat_jax.training.compilation import (
    COMMUNICATION,
    NO_TRITON_GEMM,
    QUEUES,
    compiler_options,
    use_cache,
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
    monkeypatch.setattr(compilation, "query_gpus", {"compute_cap": capabilities}.get)
    monkeypatch.setenv(QUEUES, given or "")
    if given is None:
        monkeypatch.delenv(QUEUES)
    use_one_queue(offload=offload)
    assert os.environ.get(QUEUES) == queues


PROGRAM = """
import sys, jax, jax.numpy as jnp
from coat_jax.training.compilation import use_cache
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
use_cache(sys.argv[1])
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.split("/")[-1]))
jax.jit(lambda x: jnp.sin(x) * 2)(jnp.ones(3)).block_until_ready()
print("hits" if "cache_hits" in events else "misses")
"""


def test_a_second_process_finds_the_program_and_compiles_what_is_truncated(tmp_path):
    program, folder = tmp_path / "program.py", tmp_path / "cache"
    program.write_text(PROGRAM)

    def run():
        (said,) = outputs([Fork([program, folder])])
        return said.strip()

    assert [run(), run()] == ["misses", "hits"]
    for entry in folder.glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:-5])
    run()


@pytest.fixture
def no_cache():
    """JAX without a compilation cache, as before a run."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_folder_that_cannot_be_written_is_refused_unless_nobody_chose_it(
    tmp_path, monkeypatch, no_cache
):
    """A home that cannot be written must not end a run."""
    (tmp_path / "file").touch()
    for folder in ("file", "file/x"):
        problem = f"{folder} cannot be used: .*/file is not a folder.*--cache none"
        with pytest.raises(UserError, match=problem):
            use_cache(str(tmp_path / folder))
    monkeypatch.setattr(compilation, "CACHE", str(tmp_path / "file" / "xla"))
    notes = []
    use_cache(compilation.CACHE, note=notes.append)
    assert len(notes) == 1
    assert "Every start compiles anew" in notes[0]
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match="is not writable"):
        use_cache(str(tmp_path / "new"))
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_a_folder_that_jax_was_given_before_is_used(tmp_path, no_cache):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    for folder in (compilation.CACHE, "other"):
        use_cache(folder, note=pytest.fail)
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)


def test_a_url_is_passed_to_jax_and_an_empty_setting_of_jax_names_no_folder(
    tmp_path, monkeypatch, no_cache
):
    use_cache("gs://bucket/cache")
    assert jax.config.values["jax_compilation_cache_dir"] == "gs://bucket/cache"
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_compilation_cache_dir", "")
    use_cache(str(tmp_path / "cache"))
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []
