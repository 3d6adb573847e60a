"""The compilation cache: programs are found again, and what a kill left is not."""

import hashlib
import os
import zlib
from pathlib import Path

import jax
import pytest
import zstandard
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


def test_a_second_process_finds_the_program_even_after_an_entry_was_truncated(tmp_path):
    program, folder = tmp_path / "program.py", tmp_path / "cache"
    program.write_text(PROGRAM)

    def run():
        (said,) = outputs([Fork([program, folder])])
        return said.strip()

    assert [run(), run()] == ["misses", "hits"]
    for entry in folder.glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:-5])
    assert run() == "misses"


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
    for folder, problem in (("file", "it is not a folder"), ("file/x", ".*/file is not a folder")):
        with pytest.raises(UserError, match=f"{folder} cannot be used: {problem}.*--cache none"):
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


def test_a_folder_that_jax_was_given_before_is_used_and_named(tmp_path, no_cache):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    notes = []
    for folder in (compilation_cache.FOLDER, str(tmp_path), "other"):
        compilation_cache.use_cache(folder, note=notes.append)
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)
    assert [text.partition(":")[0] for text in notes] == [
        f"The compilation cache is {tmp_path}, not other"
    ]
    (tmp_path / "file").touch()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "file"))
    compilation_cache.use_cache(compilation_cache.FOLDER, note=notes.append)
    assert "file cannot be used: it is not a folder. Every start compiles anew." in notes[-1]


def test_a_url_is_passed_to_jax_and_an_empty_setting_of_jax_names_no_folder(
    tmp_path, monkeypatch, no_cache
):
    """The current folder, which it would name as a path, must not be searched for entries."""
    compilation_cache.use_cache("gs://bucket/cache")
    assert jax.config.values["jax_compilation_cache_dir"] == "gs://bucket/cache"
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_compilation_cache_dir", "")
    compilation_cache.use_cache(str(tmp_path / "cache"))
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def entry(folder, name, content=b""):
    """A file with a name as JAX gives it."""
    path = folder / f"{name}-{hashlib.sha256(name.encode()).hexdigest()}-cache"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("compress", [zlib.compress, zstandard.compress])
def test_an_entry_that_ends_too_early_is_deleted(tmp_path, compress):
    whole = compress(b"a program" * 100)
    others = [tmp_path / "other", tmp_path / "my-cache"]
    for path in others:
        path.write_bytes(b"not JAX's")
    cut = {entry(tmp_path, f"cut{length}", whole[:length]) for length in (0, 1, 10, -1)}
    right = entry(tmp_path, "whole", whole)
    assert set(compilation_cache.delete_unreadable(tmp_path)) == cut
    assert set(tmp_path.iterdir()) == {tmp_path / compilation_cache.CHECKED, right, *others}


def test_an_entry_that_another_process_deletes_first_is_passed_over(tmp_path, monkeypatch):
    found = [entry(tmp_path, "gone"), left := entry(tmp_path, "left")]
    found[0].unlink()
    monkeypatch.setattr(compilation_cache, "entries", lambda folder: iter(found))
    assert compilation_cache.delete_unreadable(tmp_path) == [left]


@pytest.mark.parametrize("method", ["touch", "read_bytes", "unlink"])
def test_what_belongs_to_another_user_is_left_alone(tmp_path, monkeypatch, method):
    foreign, own = entry(tmp_path, "foreign"), entry(tmp_path, "own")
    ours = getattr(Path, method)

    def refused(path, *args, **kwargs):
        if path != own:
            raise PermissionError(13, "Permission denied", str(path))
        return ours(path, *args, **kwargs)

    monkeypatch.setattr(Path, method, refused)
    assert own in compilation_cache.delete_unreadable(tmp_path)
    assert foreign.exists() == (method != "touch")


def test_an_entry_is_read_by_one_start_only(tmp_path):
    """A cache of gigabytes must not be decompressed at every start."""
    old = entry(tmp_path, "old", zlib.compress(b"a program"))
    assert compilation_cache.delete_unreadable(tmp_path) == []
    old.write_bytes(b"")
    new = entry(tmp_path, "new")
    checked = (tmp_path / compilation_cache.CHECKED).stat().st_mtime_ns
    os.utime(old, ns=(checked - 1, checked - 1))
    assert compilation_cache.delete_unreadable(tmp_path) == [new]
