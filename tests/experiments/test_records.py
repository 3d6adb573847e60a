"""Results files name where their figures come from."""

import json

import pytest

from experiments import records


def test_a_file_names_its_parents(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMIT", "0123abc")
    path = tmp_path / "new" / "a.json"
    records.write(path, {"ms": 1.5})
    assert records.read(path) == {"ms": 1.5}
    parents = json.loads(path.read_text())["parents"]
    assert parents["commit"] == "0123abc"
    assert parents["code"] == records.code_hash()
    assert parents["hardware"]["device"] == "cpu"
    assert {"coat_jax", "python", "jax", "jaxlib"} <= parents["versions"].keys()
    assert "torchvision" not in parents["versions"]
    assert {"script", "dirty", "date"} <= parents.keys()


def test_figures_that_are_not_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.write(tmp_path / "a.json", {"ms": float("nan")})


def test_the_hash_of_the_code_is_that_of_the_package(tmp_path, monkeypatch):
    package = tmp_path / "coat_jax"
    package.mkdir()
    monkeypatch.setattr(records, "ROOT", tmp_path)
    hashes = []
    for name, source in (("a.py", "x = 1"), ("b.py", ""), ("a.py", "x = 2"), ("notes.md", "")):
        (package / name).write_text(source)
        hashes.append(records.code_hash())
    assert len(set(hashes)) == 3
    assert hashes[2] == hashes[3]
