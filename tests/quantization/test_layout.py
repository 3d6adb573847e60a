"""Which scheme a quantization_config gives each projection, and patterns that are refused."""

import itertools
import re
import subprocess
import sys

import pytest
from small_model import SMALL

from coat_jax.errors import UserError
from coat_jax.quantization import Scheme, layout, patterns
from coat_jax.quantization.projections import paths_of

SCHEMES = {
    "name": Scheme("int8", "dynamic"),
    "pattern": Scheme("fp8", "dynamic"),
    "class": Scheme("fp8", "none"),
}
TARGETS = {
    "name": ["model.layers.1.mlp.down_proj"],
    "pattern": [r"re:.*\.mlp\.(gate|up|down)_proj$"],
    "class": ["Linear"],
}


def group(scheme, targets):
    said = layout.to_json(SMALL, {paths_of(SMALL)[0]: scheme})
    (one,) = said["config_groups"].values()
    return {**one, "targets": targets}


def said(groups, ignore=()):
    return {
        "quant_method": "compressed-tensors",
        "config_groups": groups,
        "ignore": ["lm_head", *ignore],
    }


@pytest.mark.parametrize("order", list(itertools.permutations(SCHEMES)))
def test_a_name_comes_before_a_pattern_and_a_pattern_before_a_class(order):
    """As in compressed-tensors, whose files may have the groups in any order."""
    groups = {kind: group(SCHEMES[kind], TARGETS[kind]) for kind in order}
    schemes = layout.from_json(said(groups), SMALL)
    assert schemes["layers.1.mlp.down"] == SCHEMES["name"]
    assert schemes["layers.0.mlp.down"] == SCHEMES["pattern"]
    assert schemes["layers.1.attention.out"] == SCHEMES["class"]
    assert len(schemes) == len(paths_of(SMALL))


@pytest.mark.parametrize("kind", ["name", "pattern", "class"])
def test_two_groups_that_name_a_module_alike_must_agree(kind):
    groups = {
        "one": group(SCHEMES["name"], TARGETS[kind]),
        "other": group(SCHEMES["name"], TARGETS[kind]),
    }
    assert SCHEMES["name"] in layout.from_json(said(groups), SMALL).values()
    groups["other"] = group(SCHEMES["class"], TARGETS[kind])
    with pytest.raises(UserError, match=r"one and other for model\.layers\..*leave it in one"):
        layout.from_json(said(groups), SMALL)


# --- Patterns in others' files ---------------------------------------------------------------

NAME = "model.layers.31.self_attn.q_proj"


@pytest.mark.parametrize(
    ("place", "pattern", "named"),
    [
        ("targets", "re:(.*.*)*X", r"'re:\(\.\*\.\*\)\*X'.* very long.*names themselves"),
        ("ignore", "re:" + ".?" * 30 + "X", r"'re:\.\?.*more than 4,000,000 ways"),
        ("ignore", "re:(", "missing \\)"),
    ],
)
def test_a_pattern_that_could_hang_is_named_instead(place, pattern, named):
    targets, ignore = ["Linear"], []
    (targets if place == "targets" else ignore).append(pattern)
    with pytest.raises(UserError, match=named):
        layout.from_json(said({"one": group(SCHEMES["name"], targets)}, ignore), SMALL)


def test_many_patterns_are_bounded_together():
    groups = {"one": group(SCHEMES["name"], ["Linear"])}
    many = ["re:" + ".*" * 4 + "X" * number for number in range(20)]
    layout.from_json(said(groups, many[1:3]), SMALL)
    with pytest.raises(UserError, match="more than 4,000,000 ways"):
        layout.from_json(said(groups, many), SMALL)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*self_attn\.(q|k|v|o)_proj$",
        r"^model\.layers\.(?:[1-9]|1[0-9])\..*",
        r".*layers\.(" + "|".join(map(str, range(32))) + r")\..*\.(q|k|v|o)_proj.*",
        r".*mlp(\.experts\.\d+)?\.(?P<which>gate|up)_proj",
        r"(?!.*down).*\.[a-z]+_proj",
        r"[^]*+(|]+?\(\|\*",
        r"(?:layers)?\{\d{1,2}",
        r"a{}|b{x}",
        r"(?i).*LM_HEAD",
    ],
)
def test_usual_patterns_match_as_re_says(pattern):
    found, ways = patterns.compile_bounded(pattern)
    assert found == re.compile(pattern)
    assert ways <= patterns.MOST_WAYS


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("(a+)+b", r"'\)\+' in it"),
        ("(?:a|a)*b", r"'\)\*' in it"),
        ("((a?)b){2,}c", r"'\){' in it"),
        (r"(a\)+)+b", r"'\)\+' in it"),
        (r"()\1{1000000000}", r"'\{1000000000' in it"),
        ("a{99999999999999999999}", "too large"),
        ("(?x)(a+) +b", r"'\(\?x' in it"),
        ("(?ix:(a+) +b)", r"'\(\?ix' in it"),
        ("(?#[)(a+)+b#]", r"'\)\+' in it"),
        ("(" * 5000 + ")" * 5000, "recursion"),
        ("[", "unterminated"),
    ],
)
def test_patterns_that_might_not_end_are_refused(pattern, named):
    with pytest.raises(ValueError, match=named):
        patterns.compile_bounded(pattern)


def test_what_is_not_refused_soon_ends():
    """In another process, which can be stopped: `re` cannot."""
    longest = []
    for part in (".*", ".*?", ".?", "a?", "(.|.)", "(.*)?", "(|)"):
        number = 1
        while patterns.compile_bounded(part * (number + 1) + "X")[1] <= patterns.MOST_WAYS:
            number += 1
            assert number < 30
        longest.append(part * number + "X")
    program = f"import re; [re.match(pattern, {NAME!r}) for pattern in {longest!r}]"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_names_of_projections_are_as_short_as_the_bound_takes_them_to_be():
    paths = [path.replace("layers.1.", "layers.99999.") for path in paths_of(SMALL)]
    assert max(len(layout.module_of(path)) for path in paths) <= patterns.NAME
