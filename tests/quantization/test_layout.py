"""Which scheme a quantization_config gives each projection, and patterns that are refused."""

import itertools

import pytest
from small_model import SMALL

from coat_jax.errors import UserError
from coat_jax.quantization import Scheme, layout
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


@pytest.mark.parametrize("place", ["ignore", "targets"])
@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("re:(.*.*)*X", r"'re:\(\.\*\.\*\)\*X'.* repeated .*names themselves"),
        ("re:" + ".?" * 30 + "X", r"more than 4,000,000 ways, 're:\.\?"),
        ("re:(", "missing \\)"),
    ],
)
def test_a_pattern_that_could_hang_is_named_instead(place, pattern, named):
    targets = ["Linear", pattern] if place == "targets" else ["Linear"]
    ignore = [pattern] if place == "ignore" else []
    groups = {"one": group(SCHEMES["name"], targets)}
    with pytest.raises(UserError, match=named):
        layout.from_json(said(groups, ignore), SMALL)


def test_many_patterns_are_bounded_together():
    groups = {"one": group(SCHEMES["name"], ["Linear"])}
    patterns = ["re:" + ".*" * 4 + "X" * number for number in range(20)]
    layout.from_json(said(groups, patterns[1:3]), SMALL)
    with pytest.raises(UserError, match="more than 4,000,000 ways"):
        layout.from_json(said(groups, patterns), SMALL)
