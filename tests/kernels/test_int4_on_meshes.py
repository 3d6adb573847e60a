"""INT4 codes are expanded alike on every mesh, whether it is set or only of the arrays.

The kernel does not run here: in its place stands a function that computes from the same arrays.
"""

import contextlib
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from int4_laws import weight_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.kernels import int4, sharding
from coat_jax.numerics import four_bits
from coat_jax.numerics.formats import E4M3


def launch(kernel, codes, scale, *of_channel, outputs, programs, warps, SPEC):
    del kernel, warps
    assert (programs, SPEC.groups) == scale.shape == (len(codes), outputs[0].shape[1] // 128)
    if SPEC.finds:
        return [*four_bits.expand(codes, scale)]
    expanded = four_bits.values(codes, scale) / of_channel[0][:, None]
    return [expanded.astype(E4M3), jax.numpy.zeros(outputs[1].shape)]


@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("spec", [P("n"), P(None, "k"), P("n", "k")])
def test_codes_do_not_depend_on_the_mesh(monkeypatch, spec, is_set):
    monkeypatch.setattr(sharding, "launch", launch)
    stands_in = SimpleNamespace(expand_channel=None)
    monkeypatch.setitem(sys.modules, "coat_jax.kernels.triton.int4", stands_in)
    weight = weight_of(64, 1024)
    mesh = jax.make_mesh((2, 4), ("n", "k"), axis_types=(AxisType.Auto,) * 2)
    arrays = jax.device_put((weight.codes, weight.scale), NamedSharding(mesh, spec))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        got = jax.jit(int4.expand)(*arrays)
    for ours, theirs in zip(got, four_bits.expand(weight.codes, weight.scale), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if is_set:
        assert got[0].sharding.is_equivalent_to(arrays[0].sharding, 2)
