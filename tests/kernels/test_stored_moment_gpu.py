"""The kernels for moments of any optimizer on a GPU, against their references."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("jax_triton")
from stored_moment_cases import (
    ALL_FP8,
    CASES,
    Case,
    StoredMomentLaws,
    check,
    moment_of,
    stored_of,
)

from coat_jax.kernels import stored_moment
from coat_jax.numerics import noise
from coat_jax.numerics.expansion import Expanded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]

LARGE = [
    Case("2^22 elements", (2048, 2048)),
    Case("2^22 elements, bfloat16", (2048, 2048), dtype="bfloat16"),
    Case("large and uneven", (1111, 1300)),
]


@pytest.mark.parametrize("case", CASES + LARGE, ids=lambda case: case.name)
def test_kernels_agree_with_their_references(case: Case) -> None:
    check(case)


class TestKernels(StoredMomentLaws):
    pass


@pytest.mark.several_gpus
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
def test_no_mesh_changes_a_bit() -> None:
    """Nor the random numbers: every device knows which groups it has."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    case = Case("", (16, 2048))
    key, new, stored = noise.leaf_key(0, 1, 2), moment_of(case, 1), stored_of(case)

    @jax.jit
    def run(stored: Expanded, new: jax.Array) -> tuple:
        read = stored_moment.read(stored, ALL_FP8, "triton")
        return read, stored_moment.rewrite(stored, new, ALL_FP8, key, "triton")

    wanted = run(stored, new)
    for spec in (P("x"), P(None, "x")):
        sharding = NamedSharding(mesh, spec)
        with jax.set_mesh(mesh):
            got = run(*jax.device_put((stored, new), sharding))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert a.sharding.is_equivalent_to(sharding, a.ndim)
            np.testing.assert_array_equal(np.float32(a), np.float32(b))
