"""What is recorded of an operand is what was rounded to make it."""

import numpy as np
import pytest
from ops_cases import draw, some_norm, weight

import coat_jax as coat
from coat_jax.kernels import gemm
from coat_jax.kernels.activation import Limited
from coat_jax.ops import recording
from coat_jax.ops.norm import save_norm
from coat_jax.ops.projection import Layers, Mode
from coat_jax.ops.saved_activation import save_activation

F = 64
LAYERS = Layers((weight(2, F, F),), (None,))
precisions = pytest.mark.parametrize(
    "precision", [coat.COAT, coat.COAT_PAPER], ids=["coat", "coat_paper"]
)


@pytest.fixture
def recorded(monkeypatch):
    """The values of each operand of a forward product, by name."""
    found = {}
    monkeypatch.setattr(recording, "products", lambda *args, **_: found.update([args[:2]]) or {})
    return found


def codes_of(values, operand):
    made = gemm.operand(values, coat.E4M3, scale=operand.scale)
    return np.asarray(made.values, np.float32), np.asarray(operand.values, np.float32)


@precisions
def test_a_norm_is_recorded_as_it_was_computed(precision, recorded):
    """From the exact input, or from the saved one."""
    x, norm, mode = draw(0, (2, 16, F)), some_norm("rms", F, 1), Mode(precision, "xla")
    saved, operand = save_norm(x, norm, mode)
    recording.norm(x, saved, LAYERS, (None,), mode)
    again, made = codes_of(recorded["input"], operand)
    np.testing.assert_array_equal(again, made)


@precisions
def test_an_activation_is_recorded_as_it_was_computed(precision, recorded):
    hidden, mode = [draw(i, (2, 16, F)) for i in range(2)], Mode(precision, "xla")
    act = Limited("silu", 1.0)
    saved, operand = save_activation(hidden, act, mode)
    recording.activation(hidden, saved, act, LAYERS, (None,), mode)
    again, made = codes_of(recorded["down/input"], operand)
    np.testing.assert_array_equal(again, made)
