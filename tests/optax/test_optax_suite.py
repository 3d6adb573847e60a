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


def compressed_adamw(learning_rate: optax.ScalarOrSchedule):
    return compress(optax.adamw(learning_rate), storage=FP8)


def compressed_lion(learning_rate: optax.ScalarOrSchedule):
    return compress(optax.lion(learning_rate), storage=FP8)


FACTORIES = {
    "fp8_adamw": fp8_adamw,
    "compressed adamw": compressed_adamw,
    "compressed lion": compressed_lion,
    "fp8_adamw in fp8": functools.partial(fp8_adamw, storage=FP8),
}
LEARNING_RATES = {name: 1e-3 if "lion" in name else 1e-2 for name in FACTORIES}
TARGETS = [
    suite._setup_parabola,
    suite._setup_rosenbrock,
    suite._setup_matrix_parabola,
    suite._setup_mixed_tensor_target,
]

every_optimizer = pytest.mark.parametrize("name", FACTORIES)


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    monkeypatch.setattr(suite, "_get_opt_factory", FACTORIES.__getitem__)


def run(test, name, **arguments):
    """Runs the function that `suite.ContribTest` expanded into `test`0, `test`1 and so on."""
    expanded = getattr(suite.ContribTest, f"{test}0")
    expanded.__wrapped__(
        suite.ContribTest(f"{test}0"),
        opt_name=name,
        opt_kwargs={"learning_rate": LEARNING_RATES[name]},
        wrapper_name=None,
        wrapper_kwargs=None,
        **arguments,
    )


@every_optimizer
def test_extra_arguments_are_accepted_and_nothing_recompiles(name):
    run("test_optimizers_accept_extra_args", name, wrap=False)


@pytest.mark.costly
@every_optimizer
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__[7:])
def test_thirty_thousand_steps_converge(name, target):
    run("test_optimizers", name, target=target, dtype="float32")


@pytest.mark.costly
@every_optimizer
def test_hyperparameters_can_be_injected(name):
    run("test_optimizers_can_be_wrapped_in_inject_hyperparams", name)


@pytest.mark.costly
@every_optimizer
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_updates_have_the_parameters_dtype(name, dtype):
    run("test_preserve_dtype", name, dtype=dtype)


@pytest.mark.costly
@every_optimizer
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_can_be_accumulated(name, dtype):
    run("test_gradient_accumulation", name, dtype=dtype)


@pytest.mark.costly
@every_optimizer
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_shapes_and_dtypes_of_the_state_are_stable(name, dtype):
    run("test_state_shape_dtype_shard_stability", name, dtype=dtype)


@pytest.mark.costly
@every_optimizer
def test_learning_rate_may_be_a_schedule(name):
    run("test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such", name)
