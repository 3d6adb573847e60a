"""A field holds what its annotation says, of whatever type and size the value is."""

import dataclasses
import json
from typing import Annotated, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coat_jax.errors import UserError
from coat_jax.validation import Between, Count, from_json, require_fields


@dataclasses.dataclass(frozen=True)
class Inner:
    share: Annotated[float, Between(least=0, below=1)] = 0.5

    def __post_init__(self) -> None:
        require_fields(self)


@dataclasses.dataclass(frozen=True)
class Outer:
    count: Count = 3
    kind: Literal["a", "b"] | None = None
    names: tuple[str, ...] = ()
    flag: bool = False
    inner: Inner | float = Inner()

    def __post_init__(self) -> None:
        require_fields(self, "outer.")


@pytest.mark.parametrize("value", [0, -1, 2**31, 10**40, 1.0, float("nan"), True, "3", None, []])
def test_a_count_is_a_whole_number_from_1(value):
    with pytest.raises(UserError, match=r"outer.count=.* from 1 to 2,147,483,647. The default is"):
        Outer(count=value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-9, 1, 1e30, "0.1", None, 0j])
def test_a_number_is_in_its_range_and_finite(value):
    with pytest.raises(UserError, match=r"share=.* must be a number of at least 0 and below 1"):
        Inner(value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "c"}, "outer.kind='c' must be 'a' or 'b' or None"),
        ({"kind": ["a"]}, r"outer.kind=\['a'\] must be"),
        ({"names": ["a"]}, r"names=\['a'\] must be a tuple of texts, as in \('a', 'b'\)"),
        ({"names": (1,)}, "must be a tuple of texts"),
        ({"flag": 1}, "flag=1 must be True or False"),
        ({"inner": "x"}, "inner='x' must be an Inner or a number"),
        ({"inner": float("inf")}, "inner=inf must be"),
        ({"inner": np.zeros((2, 3))}, r"inner=float64\[2, 3\] must be"),
        ({"inner": Inner}, "inner=Inner must be"),
        ({"names": "x" * 999}, r"x\.\.\. must be a tuple"),
    ],
)
def test_other_fields_hold_what_they_say(changes, message):
    with pytest.raises(UserError, match=message):
        Outer(**changes)


def test_numpy_s_numbers_become_python_s():
    made = Outer(count=np.int64(4), flag=np.bool_(True), inner=np.float32(0.5))
    assert [type(value) for value in (made.count, made.flag, made.inner)] == [int, bool, float]


def test_a_config_comes_back_from_json():
    made = Outer(7, "b", ("x", "y"), True, Inner(0.25))
    assert from_json(Outer, json.loads(json.dumps(dataclasses.asdict(made))), "x") == made


TEXT = st.sampled_from(["", "a", "\n", "\ud800", "x" * 99])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner),
    max_leaves=5,
)
NAMES = [field.name for field in dataclasses.fields(Outer)]


@given(st.dictionaries(st.sampled_from([*NAMES, "other"]), JSON) | JSON)
def test_json_that_is_no_config_is_refused_in_one_line(data):
    whole = {**dataclasses.asdict(Outer()), **data} if isinstance(data, dict) else data
    said = ""
    try:
        from_json(Outer, whole, "file")
    except UserError as error:
        said = str(error)
    assert len(said) < 300
    assert "\n" not in said
