"""Optax's own common tests for contributed optimizers, from the installed wheel, run on ours.

`optax/contrib/_common_test.py` expands its tests over a list of optax's optimizers while it is
imported. Here the functions under that expansion are called with our optimizers instead, which
`_get_opt_factory` finds by name. The targets have 2 to 7 parameters, which stay in FP32 by
default; Storage(min_size=0) puts them in FP8.
"""

import functools

import jax.numpy as jnp
import optax
import pytest

from coat_jax.optax import Storage, compress, fp8_adamw

suite = pytest.importorskip("optax.contrib._common_test")

FP8 = Storage(min_size=0)


def compressed_lion(learning_rate: optax.ScalarOrSchedule):
    return compress(optax.lion(learning_rate), storage=FP8)


FACTORIES = {
    "fp8_adamw": fp8_adamw,
    "compressed lion": compressed_lion,
    "fp8_adamw in fp8": functools.partial(fp8_adamw, storage=FP8),
}
TARGETS = [
    suite._setup_parabola,
    suite._setup_rosenbrock,
    suite._setup_matrix_parabola,
    suite._setup_mixed_tensor_target,
]
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]
TESTS = [
    *(("test_optimizers", {"target": target, "dtype": "float32"}) for target in TARGETS),
    *(("test_preserve_dtype", {"dtype": dtype}) for dtype in ("bfloat16", "float32")),
    *(("test_gradient_accumulation", {"dtype": dtype}) for dtype in ("bfloat16", "float32")),
    ("test_optimizers_can_be_wrapped_in_inject_hyperparams", {}),
    ("test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such", {}),
    ("test_optimizers_accept_extra_args", {"wrap": False}),
    *(("test_state_shape_dtype_shard_stability", {"dtype": dtype}) for dtype in DTYPES),
]


@pytest.mark.costly
@pytest.mark.parametrize(("test", "arguments"), TESTS)
@pytest.mark.parametrize("name", FACTORIES)
def test_optaxs_own_tests_pass(name, test, arguments, monkeypatch):
    """Calls the function that `suite.ContribTest` expanded into `test`0, `test`1 and so on."""
    monkeypatch.setattr(suite, "_get_opt_factory", FACTORIES.__getitem__)
    expanded = getattr(suite.ContribTest, f"{test}0")
    expanded.__wrapped__(
        suite.ContribTest(f"{test}0"),
        opt_name=name,
        opt_kwargs={"learning_rate": 1e-3 if "lion" in name else 1e-2},
        wrapper_name=None,
        wrapper_kwargs=None,
        **arguments,
    )
