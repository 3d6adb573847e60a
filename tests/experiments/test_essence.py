"""A hash of code follows what it does, on every version of Python alike."""

import hashlib

from experiments import essence
from experiments.essence import code_hash

PLAIN = "from a import b\ndef f(x):\n    return x + 1\n"
NOTED = '''"""Text."""
from a.c import b


def f(x):
    """Text."""
    # Text.
    return (x + 1)
'''
# f-strings, patterns and annotations: versions of Python differ in the fields of their nodes.
RICH = """
@wraps(f)
async def g(a: int, /, *b, c=1, **d) -> str:
    match a:
        case {"k": [x, *_]} if x > 1:
            return f"{x!r:>{c}} and {d['k']}"
    with h() as y:
        return lambda: (yield)
    try:
        return b"\\0" + 1e-30 * 2j
    except* ValueError:
        raise
"""


def test_words_and_layout_do_not_count():
    assert essence.essence(PLAIN) == essence.essence(NOTED)


def test_shapes_in_annotations_do_not_count_but_other_strings_do():
    typed = (
        'from jaxtyping import Array, Float as F\ndef f(x: F[Array, "B T"]):\n    return D[x, "k"]'
    )
    renamed = essence.essence(typed.replace("B T", "rows columns"))
    assert essence.essence(typed) == renamed
    for change in (
        ('"k"', '"l"'),
        ("F[Array", "F[Matrix"),
        ("import Array, Float as F", "import a"),
    ):
        assert essence.essence(typed.replace(*change)) != renamed


def test_a_change_of_what_is_computed_changes_the_essence():
    changes = {"1": "2", "+": "-", "f(": "g(", "x + 1": "x + 1, ''"}
    for other in (PLAIN.replace(*change) for change in changes.items()):
        assert essence.essence(PLAIN) != essence.essence(other)


def test_an_essence_is_the_same_on_all_versions_of_python():
    digest = hashlib.sha256(essence.essence(RICH).encode()).hexdigest()
    assert digest[:16] == "9b4684019d3bedf1"


def test_the_hash_of_the_package_follows_its_files(tmp_path, monkeypatch):
    package = tmp_path / "coat_jax"
    package.mkdir()
    monkeypatch.setattr(essence, "ROOT", tmp_path)
    monkeypatch.setattr(essence, "PACKAGE", package)
    (package / "a.py").write_text(PLAIN)
    first = code_hash()
    (package / "a.py").write_text(NOTED)
    assert code_hash() == first
    (package / "a.py").rename(package / "b.py")
    assert code_hash() != first
