"""Parameters outside of memory: read in pieces, stacked or not, they are the same numbers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from model_cases import variant
from small_model import filled

from coat_jax.errors import UserError
from coat_jax.models import lazy_arrays
from coat_jax.models.lazy_arrays import LazyArray

SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=3)


def held(model):
    """The parameters of a model, as if they were elsewhere."""
    return {
        path: array(np.asarray(leaf[...]))
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def array(values):
    return LazyArray(values.shape, values.dtype, values.shape, lambda index: values[index])


def assert_same(got, wanted):
    got, wanted = (dict(nnx.to_flat_state(nnx.state(model))) for model in (got, wanted))
    assert got.keys() == wanted.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(got[path][...], leaf[...], err_msg=str(path))


@given(SIZES, st.data())
def test_pieces_cover_a_parameter_once(shape, data):
    piece = tuple(data.draw(st.integers(1, size)) for size in shape)
    seen = np.zeros(shape, int)
    for index in lazy_arrays.pieces(
        LazyArray(tuple(shape), np.dtype(int), piece, lambda index: seen)
    ):
        assert all(n <= most for n, most in zip(seen[index].shape, piece, strict=True))
        seen[index] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("shape", [(80, 8192, 28672), (128256, 8192), (4, 7), (5,)])
def test_pieces_are_small_and_no_smaller_than_need_be(shape):
    for stacked, rest in ((True, shape[1:]), (False, shape)):
        piece = lazy_arrays.piece_of(shape, 2, stacked=stacked)
        assert (
            min(2 * math.prod(rest), lazy_arrays.PIECE // 2)
            <= 2 * math.prod(piece)
            <= lazy_arrays.PIECE
        )
        assert not stacked or piece[0] == 1


@pytest.mark.parametrize("scan", [True, False])
def test_layers_may_be_stacked_here_and_not_there(scan):
    there, here = variant(scan=scan, layers=3), variant(scan=not scan, layers=3)
    model = lazy_arrays.load(here, held(filled(there)))
    assert isinstance(model.layers, nnx.List) == scan
    assert_same(lazy_arrays.load(there, held(model)), filled(there))


def test_layers_are_stacked_in_their_order_however_they_are_listed():
    """As a checkpoint lists them: layer 10 before layer 2."""
    there, here = variant(scan=False, layers=11), variant(scan=True, layers=11)
    parameters = held(filled(there))
    as_text = {name: parameters[name] for name in sorted(parameters, key=lambda n: [*map(str, n)])}
    assert list(as_text) != list(parameters)
    assert_same(lazy_arrays.load(here, as_text), lazy_arrays.load(here, parameters))


@pytest.mark.parametrize("scan", [True, False])
def test_rearranged_parameters_are_read_in_pieces(scan):
    parameters = held(filled(variant(scan=scan, layers=3)))
    for one in lazy_arrays.arranged(parameters, scan=not scan).values():
        whole = one.read((slice(None),) * len(one.shape))
        assert whole.shape == one.shape
        small = one._replace(piece=tuple(math.ceil(n / 2) for n in one.shape))
        for index in lazy_arrays.pieces(small):
            np.testing.assert_array_equal(one.read(index), whole[index])


def test_parameters_are_cast_to_those_of_the_config():
    model = filled(variant())
    low = lazy_arrays.load(variant(param_dtype=jnp.bfloat16), held(model))
    assert low.embed[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(low.embed[...], model.embed[...].astype(jnp.bfloat16))


OTHERS = [
    ({"tied": True}, "it also has head"),
    ({"qkv_bias": True}, r"it lacks layers\.attention\.key_bias, layers\.attention\.query_b"),
    ({"ffn": 96}, r"it has in another shape layers\.mlp\.down, layers\.mlp\.gate"),
    ({"layers": 3}, r"it has in another shape layers\.attention\.key,"),
]


@pytest.mark.parametrize(("changes", "message"), OTHERS)
def test_parameters_of_another_model_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        lazy_arrays.load(variant(**changes), held(filled(variant())))


@pytest.mark.parametrize("scan", [True, False])
def test_thousands_of_layers_that_are_not_there_are_refused_before_they_are_built(scan):
    parameters, claimed = held(filled(variant(scan=scan))), variant(scan=False, layers=10_000)
    for refuse in (lazy_arrays.load, lazy_arrays.require_same):
        with pytest.raises(UserError, match=r"it has 2 layers, and layers=10,000"):
            refuse(claimed, parameters)
