"""Laws of coat_jax.printable."""

import sys
import unicodedata

import pytest

from coat_jax.printable import amount, printable

REORDERING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
EVERY = "".join(map(chr, range(sys.maxunicode + 1)))


def test_no_character_is_left_that_a_terminal_obeys_or_no_encoding_has():
    shown = printable(EVERY)
    assert {c for c in shown if unicodedata.category(c) == "Cc"} == {"\t", "\n"}
    assert not {c for c in shown if unicodedata.bidirectional(c) in REORDERING}
    assert len(shown.splitlines()) == 2
    assert shown.encode("utf-8").decode("utf-8") == shown


def test_all_other_characters_stay():
    others = "".join(c for c in EVERY if unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp"))
    others = "".join(c for c in others if unicodedata.bidirectional(c) not in REORDERING)
    assert printable(others) == others


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\rb\x7f\x9b31m", r"a\x0db\x7f\x9b31m"),
        ("a\tb\nc é 漢 🙂", "a\tb\nc é 漢 🙂"),
        ("\udc80", r"\udc80"),
        ("a\u202eb\u2066c\u2028d", r"a\u202eb\u2066c\u2028d"),
    ],
)
def test_controls_are_shown_as_escapes(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (2000, "2,000 files")]
)
def test_one_thing_is_singular(number, said):
    assert amount(number, "file") == said
