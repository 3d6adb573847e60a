"""Choosing the next token: against transformers, and against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.generation.sampling import Sampling, choose, restrict

LOGITS = jax.device_put(2 * np.float32(np.random.default_rng(0).standard_normal((4, 50))))
ROWS = jax.device_put(np.arange(4, dtype=np.int32))
jitted = jax.jit(choose, static_argnums=1)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (7, 1.0), (50, 1.0), (0, 0.05), (0, 0.7), (20, 0.8), (0, 1.0)]
)
def test_the_tokens_to_choose_from_are_those_of_transformers(top_k, top_p):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    wanted = torch.tensor(np.asarray(LOGITS))
    if top_k:
        wanted = transformers.TopKLogitsWarper(top_k)(None, wanted)
    if top_p < 1:
        wanted = transformers.TopPLogitsWarper(top_p)(None, wanted)
    got = restrict(LOGITS, Sampling(top_k=top_k, top_p=top_p))
    np.testing.assert_array_equal(got, wanted.numpy())


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-45, [1]), (0.4, [1]), (0.6, [1, 3]), (0.8, [1, 2, 3]), (0.99, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_fewest_that_are_enough(top_p, kept):
    got = restrict(jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]])), Sampling(top_p=top_p))
    np.testing.assert_array_equal(np.flatnonzero(jnp.isfinite(got[0])), kept)


def test_a_top_k_above_the_vocabulary_allows_all():
    np.testing.assert_array_equal(restrict(LOGITS, Sampling(top_k=51)), LOGITS)


def test_temperature_0_takes_the_likeliest():
    got = choose(LOGITS, Sampling(temperature=0, seed=3), ROWS, ROWS)
    np.testing.assert_array_equal(got, jnp.argmax(LOGITS, axis=-1))


@pytest.mark.parametrize("likeliest", [1, 2])
def test_tokens_come_as_often_as_they_should(likeliest):
    """20,000 draws: a share s is off by sqrt(s (1 - s) / 20000), 0.0035 at most; 4 of those.

    The likeliest token, or several of them, do not shift the others.
    """
    draws, temperature = 20_000, 0.5
    shares = np.array([0.1, 0.2, 0.3] + [0.4] * likeliest)
    rows = jnp.broadcast_to(jnp.log(shares), (draws, len(shares)))
    got = jitted(rows, Sampling(temperature=temperature), jnp.arange(draws), jnp.zeros(draws, int))
    wanted = shares**2 / np.sum(shares**2)  # squared, for the temperature
    np.testing.assert_allclose(np.bincount(got) / draws, wanted, atol=4 * 0.0035)


def test_random_numbers_are_those_of_seed_text_and_step():
    many, none = jnp.arange(40), jnp.zeros(40, int)
    rows = jnp.broadcast_to(LOGITS[:1], (40, 50))

    def tokens(seed=0, numbers=many, steps=none):
        return np.asarray(jitted(rows, Sampling(temperature=3, seed=seed), numbers, steps))

    np.testing.assert_array_equal(tokens(), tokens())
    np.testing.assert_array_equal(tokens()[::-1], tokens(numbers=many[::-1]))
    assert len(set(tokens())) > 10
    assert len(set(tokens(numbers=none, steps=many))) > 10
    assert len(set(tokens(numbers=none))) == 1
    assert (tokens(seed=1) != tokens()).any()


@pytest.mark.parametrize(
    ("temperature", "scale"),
    [(1e-7, 1.0), (1e-38, 1e-30), (1e-40, 1.0), (5e-324, 1e-30), (1e-300, 1e30)],
)
def test_the_smallest_temperatures_take_the_likeliest_token(temperature, scale):
    """Of equals any may be."""
    rows = scale * jnp.array([[1.0, 3.0, 2.0, 3.0], [-5.0, -7.0, -6.0, -8.0]])
    rows = jnp.tile(rows, (16, 1))
    got = choose(rows, Sampling(temperature=temperature), jnp.arange(32), jnp.zeros(32, int))
    assert set(got[::2].tolist()) == {1, 3}
    assert set(got[1::2].tolist()) == {0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.5}, r"temperature=-0\.5 must be a number from 0 to 1e\+30"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1 must be a whole number from 0"),
        ({"top_p": 0.0}, r"top_p=0\.0 must be a number above 0 and at most 1"),
        ({"seed": 2**32}, "seed=4294967296"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)
