"""What a user names is looked at before it is read."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coat_jax.errors import UserError
from coat_jax.files import (
    MissingFile,
    expand_user,
    lines_of,
    parse_json,
    read_bytes,
    read_json,
    read_text,
)


def test_a_home_is_the_user_s(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_user("~/x") == tmp_path / "x"
    assert str(expand_user("a~/~")) == "a~/~"


@pytest.mark.parametrize("path", ["~nobody_of_this_name/x", "a\0b"])
def test_a_path_that_names_nothing_is_refused(path):
    with pytest.raises(UserError, match=r"unknown user|null character"):
        expand_user(path)


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "broken").symlink_to("gone")
    for name, message in {
        "nothing": "There is no file .*nothing",
        "": "is a folder: name the file itself",
        "pipe": "is a pipe or a device: a file must be a regular file",
        "self": "self is a link to self, which does not exist",
        "binary": "is not text in UTF-8",
        "broken": "broken is a link to gone, which does not exist",
        "a\0b": "There is no file",
    }.items():
        with pytest.raises(UserError, match=message):
            read_text(tmp_path / name)
    with pytest.raises(MissingFile, match=r"There is no config file .*nothing"):
        read_bytes(tmp_path / "nothing", "config file")
    with pytest.raises(FileNotFoundError):  # what else it is
        read_text(tmp_path / "nothing")
    assert issubclass(MissingFile, UserError)


def test_only_newlines_end_lines():
    breaks = "\x0b\x0c\x1c\x85\u2028\u2029"
    assert lines_of(f"a{breaks}b\r\nc\n\n") == [f"a{breaks}b", "c", ""]
    assert lines_of("a") == lines_of("a\n") == ["a"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 9999, "1" * 5000, b"\xff", "\0", b'"\xed\xa0\x80"', '"a"'.encode("utf-16")],
)
def test_text_that_is_not_json_is_refused(text):
    with pytest.raises(UserError, match=r"^place is not JSON"):
        parse_json(text, "place")


def test_an_error_of_json_says_where_it_is():
    with pytest.raises(UserError, match=r"^a:7 is not JSON: Expecting value: line 1 column 6"):
        parse_json('{"a":}', "a:7")
    with pytest.raises(UserError, match=r"^a is not JSON: Expecting value: line 2 column 5"):
        parse_json('{\n"a":', "a")


@given(st.binary(max_size=40))
def test_whatever_is_in_a_file_is_an_object_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("json") / "x.json"
    path.write_bytes(content)
    try:
        found = read_json(path)
    except UserError:
        return
    assert isinstance(found, dict)
