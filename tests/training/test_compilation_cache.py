"""The compilation cache: programs are found again, and a folder that cannot be used is named."""

import os

import jax
import pytest
from forks import Fork
from processes import outputs

from coat_jax.errors import UserError
from coat_jax.training import compilation_cache

PROGRAM = """
import sys, jax, jax.numpy as jnp
from coat_jax.training.compilation_cache import use_cache
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
            compilation_cache.use_cache(str(tmp_path / folder))
    monkeypatch.setattr(compilation_cache, "FOLDER", str(tmp_path / "file" / "xla"))
    notes = []
    compilation_cache.use_cache(compilation_cache.FOLDER, note=notes.append)
    assert len(notes) == 1
    assert "Every start compiles anew" in notes[0]
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match="is not writable"):
        compilation_cache.use_cache(str(tmp_path / "new"))
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_a_folder_that_jax_was_given_before_is_used(tmp_path, no_cache):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    for folder in (compilation_cache.FOLDER, "other"):
        compilation_cache.use_cache(folder, note=pytest.fail)
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)


def test_a_url_is_passed_to_jax_and_an_empty_setting_of_jax_names_no_folder(
    tmp_path, monkeypatch, no_cache
):
    compilation_cache.use_cache("gs://bucket/cache")
    assert jax.config.values["jax_compilation_cache_dir"] == "gs://bucket/cache"
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_compilation_cache_dir", "")
    compilation_cache.use_cache(str(tmp_path / "cache"))
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []
