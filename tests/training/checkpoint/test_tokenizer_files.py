"""Of somebody else's folder only a tokenizer is copied that is one, from inside the folder."""

import os

import pytest
import tokenizers

from coat_jax.errors import UserError
from coat_jax.training.checkpoint import tokenizer_files
from coat_jax.training.checkpoint.tokenizer_files import TOKENIZER

SECRET = b"root:x:0:0\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def write_tokenizer(path):
    model = tokenizers.models.WordLevel({"yes": 0, "no": 1}, unk_token="no")
    tokenizers.Tokenizer(model).save(str(path))
    return path


def read(folder, config=None, note=pytest.fail, tokenizer=None):
    files, _ = tokenizer_files.read(folder, config or {}, tokenizer, 2, note)
    return files


def test_only_the_files_of_a_tokenizer_are_read(folder):
    write_tokenizer(folder / TOKENIZER)
    (folder / "vocab.json").write_text('{"a": 1}')
    (folder / "merges.txt").write_text("a b\n")
    (folder / "tokenizer.model").write_bytes(b"pieces")
    (folder / "id_rsa").write_bytes(SECRET)
    found = read(folder)
    assert set(found) == {TOKENIZER, "vocab.json", "merges.txt", "tokenizer.model"}
    assert all(content == (folder / name).read_bytes() for name, content in found.items())
    assert not read(folder, {"data": {"train": []}}, tokenizer="bytes")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((TOKENIZER, content) for content in (b"{}", SECRET)),
        *(("generation_config.json", content) for content in (b"[]", b"[" * 9999, SECRET)),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(name, content, folder):
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        read(folder)


@pytest.mark.parametrize("name", [TOKENIZER, "vocab.json"])
def test_what_is_no_file_of_the_folder_is_refused(name, folder, tmp_path):
    """A link that leads out, a pipe, a folder."""
    (tmp_path / "secret").write_text("{}")
    for make, words in (
        (lambda path: path.symlink_to("../secret"), "is a link to .*secret, outside of the model"),
        (lambda path: path.symlink_to(tmp_path / "secret"), "is a link to .*secret, outside of"),
        (os.mkfifo, "is a pipe"),
    ):
        make(folder / name)
        with pytest.raises(UserError, match=words):
            read(folder)
        (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(UserError, match="is a folder"):
        read(folder)


def test_a_link_inside_is_followed_and_so_is_one_of_the_hub_s_cache(folder, tmp_path):
    write_tokenizer(folder / "one.json")
    (folder / TOKENIZER).symlink_to("one.json")
    assert set(read(folder)) == {TOKENIZER}
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "0f3", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_tokenizer(blobs / "abc")
    (snapshot / TOKENIZER).symlink_to("../../blobs/abc")
    assert set(read(snapshot)) == {TOKENIZER}


def test_the_tokenizer_of_a_run_is_copied_from_inside_only(folder, tmp_path):
    inside, outside = write_tokenizer(folder / "own.json"), write_tokenizer(tmp_path / "other.json")
    (tmp_path / "secret").write_bytes(SECRET)
    (folder / "link.json").symlink_to(tmp_path / "secret")
    notes = []

    def named(path):
        return read(folder, {"data": {"tokenizer": str(path)}}, notes.append)

    for data in (None, [], 3, {}, {"tokenizer": None}):
        assert read(folder, {"data": data}) == {}
    assert named(inside) == {TOKENIZER: inside.read_bytes()}
    assert notes == []
    for path in (outside, folder / ".." / "other.json", folder / "link.json", "/etc/passwd"):
        assert named(path) == {}
        assert "is outside of its folder. Name one with --tokenizer FILE" in notes.pop()
    (folder / "secret").write_bytes(SECRET)
    with pytest.raises(UserError, match="secret is not a file of the `tokenizers` library"):
        named(folder / "secret")
