"""Patterns in others' files: those that soon match or do not, and those that are refused."""

import re
import subprocess
import sys

import pytest
from small_model import SMALL

from coat_jax.quantization import layout, patterns
from coat_jax.quantization.projections import paths_of

NAME = "model.layers.31.self_attn.q_proj"
USUAL = [
    r".*lm_head",
    r".*self_attn\.(q|k|v|o)_proj$",
    r"^model\.layers\.(?:[1-9]|1[0-9])\..*",
    r".*layers\.(" + "|".join(map(str, range(32))) + r")\..*\.(q|k|v|o)_proj.*",
    r".*mlp(\.experts\.\d+)?\.(?P<which>gate|up)_proj",
    r"(?!.*down).*\.[a-z]+_proj",
    r"[^]*+(|]+?\(\|\*",
    r"(?:layers){2}\{\d{1,2}",
    r"a{}|b{x}",
    r"(?i).*LM_HEAD",
    r"(?:layer){1}s\.\d{2}\..*",
]


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_match_as_re_says(pattern):
    found, ways = patterns.compiled(pattern)
    assert found == re.compile(pattern)
    assert ways <= patterns.MOST_WAYS


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("(a+)+b", "group that is repeated"),
        ("(?:a|a)*b", "group that is repeated"),
        ("((a?)b){2,}c", "group that is repeated"),
        ("(?:x(?:y*))*?c", "group that is repeated"),
        (r"(a[)]+)+b", "group that is repeated"),
        (r"(a\)+)+b", "group that is repeated"),
        ("(?:){1000000000}", r"\{1000000000\} is more than 48 times"),
        ("a{99999999999999999999}", "too large"),
        ("(?x)(a #)\n+)+b", r"'\(\?x\)' begins a kind of group that is not read"),
        ("(?#[)(a+)+b#]", r"'\(\?#\['"),
        ("(" * 5000 + ")" * 5000, "recursion"),
        ("(", r"missing \)"),
        ("[", "unterminated"),
    ],
)
def test_patterns_that_might_not_end_are_refused(pattern, named):
    with pytest.raises(ValueError, match=named):
        patterns.compiled(pattern)


@pytest.mark.parametrize("pattern", [".*" * 20, "a?" * 30, "(.|.)" * 30, "(|)" * 30])
def test_a_row_of_choices_has_more_ways_than_are_tried(pattern):
    assert patterns.compiled(pattern + "X")[1] > patterns.MOST_WAYS


def test_what_is_not_refused_soon_ends():
    """In another process, which can be stopped: `re` cannot."""
    longest = []
    for part in (".*", ".*?", ".?", "(.|.)", "(.*)?", "(|)"):
        number = 1
        while patterns.compiled(part * (number + 1) + "X")[1] <= patterns.MOST_WAYS:
            number += 1
        longest.append(part * number + "X")
    program = f"import re; [re.match(pattern, {NAME!r}) for pattern in {longest!r}]"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_names_of_projections_are_as_short_as_the_bound_takes_them_to_be():
    paths = [path.replace("layers.1.", "layers.99999.") for path in paths_of(SMALL)]
    assert max(len(layout.module_of(path)) for path in paths) <= patterns.NAME
