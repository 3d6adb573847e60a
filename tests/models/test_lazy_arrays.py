"""Parameters outside of memory: read in pieces, stacked or not, they are the same numbers."""

import math

import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from model_cases import variant
from small_model import assert_same_model, filled

from coat_jax.models import lazy_arrays
from coat_jax.models.lazy_arrays import LazyArray

SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=3)


def array(values):
    return LazyArray(values.shape, values.dtype, values.shape, lambda index: values[index])


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
@pytest.mark.parametrize("stacked", [True, False])
def test_pieces_are_small_and_no_smaller_than_need_be(shape, stacked):
    piece = lazy_arrays.piece_of(shape, 2, stacked=stacked)
    size, whole = 2 * math.prod(piece), 2 * math.prod(shape[1:] if stacked else shape)
    assert min(whole, lazy_arrays.PIECE // 2) <= size <= lazy_arrays.PIECE
    assert not stacked or piece[0] == 1


@pytest.mark.parametrize("scan", [True, False])
def test_layers_may_be_stacked_here_and_not_there(scan):
    there, here = (variant(scan=stacked, layers=3) for stacked in (scan, not scan))
    parameters = lazy_arrays.parameters_of(filled(there))
    model = lazy_arrays.load(here, parameters)
    assert isinstance(model.layers, nnx.List) == scan
    assert_same_model(lazy_arrays.load(there, lazy_arrays.parameters_of(model)), filled(there))
    for name, one in lazy_arrays.arrange(parameters, scan=not scan).items():
        whole = dict(nnx.to_flat_state(nnx.state(model)))[name][...]
        small = one._replace(piece=tuple(math.ceil(n / 2) for n in one.shape))
        for index in lazy_arrays.pieces(small):
            np.testing.assert_array_equal(one.read(index), whole[index])


def test_layers_are_stacked_in_their_order_however_they_are_listed():
    """As a checkpoint lists them: layer 10 before layer 2."""
    numbers = [str(i) for i in range(11)]
    parameters = {("stack", int(i), "w"): array(np.full(2, int(i))) for i in sorted(numbers)}
    stacked = lazy_arrays.arrange(parameters, scan=True, stack="stack")["stack", "w"]
    np.testing.assert_array_equal(stacked.whole()[:, 0], np.arange(11))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tied": True}, "it also has head"),
        ({"qkv_bias": True}, r"it lacks layers\.attention\.key_bias, layers\.attention\.query_b"),
        ({"ffn": 96}, r"it has layers\.mlp\.down \(2, 128, 64\) instead of \(2, 96, 64\)"),
        # Before they are built.
        ({"layers": 10_000, "scan": False}, r"it has layers\.attention\.key \(2, "),
    ],
)
def test_parameters_of_another_model_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        lazy_arrays.load(variant(**changes), lazy_arrays.parameters_of(filled(variant())))
