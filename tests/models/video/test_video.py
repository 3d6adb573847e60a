"""A video transformer: its attention, its times, its noise, and what it refuses."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.errors import UserError
from coat_jax.models.video import Batch, Config, TiledAttention, VideoTransformer, sample
from coat_jax.models.video.model import noisy_of, shifted

SMALL = Config(
    latents=(4, 8, 12), channels=3, heads=2, head_dim=32, layers=2, ffn=96, text_width=16,
    time_width=32, precision="bf16", dtype=jnp.float32,
)  # fmt: skip
TILED = TiledAttention(tile=(2, 2, 3), format="bf16")
COARSE = TiledAttention(tile=(2, 2, 3), windows=(None, (1, 1, 1)), until=(0.5,), format="bf16")


def model_of(**changes):
    return VideoTransformer(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))


def batch(rows=2):
    random = np.random.default_rng(0)
    latents = random.normal(size=(rows, *SMALL.latents, SMALL.channels)).astype(np.float32)
    text = random.normal(size=(rows, 5, SMALL.text_width)).astype(np.float32)
    return Batch(latents, text, np.arange(rows, dtype=np.uint32), np.ones(rows, bool))


def velocities(model, time=(0.2, 0.8)):
    return jax.jit(lambda model, *x: model(*x))(model, *batch()[:2], jnp.array(time))


def test_attention_to_all_tiles_is_dense_attention_in_another_order():
    np.testing.assert_allclose(
        velocities(model_of(attention=TILED)), velocities(model_of()), atol=2e-5
    )


def test_the_level_of_attention_follows_from_the_time_of_each_sample():
    dense, coarse = velocities(model_of()), velocities(model_of(attention=COARSE))
    np.testing.assert_allclose(coarse[0], dense[0], atol=2e-5)  # time 0.2
    assert np.abs(coarse[1] - dense[1]).max() > 1e-3  # time 0.8


def test_times_in_bf16_are_computed_with_in_fp32():
    time, model = jnp.array([0.703, 0.2], jnp.bfloat16), model_of()
    np.testing.assert_array_equal(
        velocities(model, time), velocities(model, time.astype(jnp.float32))
    )


def gradients(model, given):
    def loss(model, given):
        return model.loss(given).mean

    return jax.jit(nnx.value_and_grad(loss))(model, given)


@pytest.mark.costly
@pytest.mark.parametrize("attention", [None, dataclasses.replace(COARSE, format="fp8")])
@pytest.mark.parametrize("precision", ["coat", "coat_lean"])
def test_a_step_in_fp8_is_near_that_in_full_precision(precision, attention):
    plain = None if attention is None else COARSE
    wanted, wanted_gradient = gradients(model_of(attention=plain), batch())
    for how in ({"scan": True}, {"scan": False}, {"remat": "layer"}):
        got, gradient = gradients(
            model_of(attention=attention, precision=precision, **how), batch()
        )
        assert abs(got / wanted - 1) < 0.01
        leaves, others = (
            jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(_listed(tree))])
            for tree in (gradient, wanted_gradient)
        )
        assert jnp.linalg.norm(leaves - others) < 0.2 * jnp.linalg.norm(others)


def _listed(gradient):
    """Gradients by name, those of layers in a list stacked."""
    state = dict(nnx.to_pure_dict(gradient))
    layers = state["layers"]
    if 0 in layers:
        state["layers"] = jax.tree.map(lambda *each: jnp.stack(each), *layers.values())
    return state


def test_noise_and_times_follow_from_seeds_alone():
    given = batch()
    noisy, time, velocity = noisy_of(SMALL, given)
    again = noisy_of(SMALL, given._replace(latents=given.latents[::-1], seed=given.seed[::-1]))
    np.testing.assert_array_equal(time, again[1][::-1])
    noise = velocity + given.latents
    np.testing.assert_allclose(noise, (again[2] + given.latents[::-1])[::-1], atol=1e-6)
    mixed = (1 - time[:, None, None, None, None]) * given.latents
    mixed += time[:, None, None, None, None] * noise
    np.testing.assert_allclose(noisy, mixed, atol=1e-6)
    many = Batch(np.zeros((4096, 1, 1, 1, 1)), None, np.arange(4096, dtype=np.uint32), None)
    times = noisy_of(SMALL, many)[1]
    # The median of a logit-normal time is 1/2, and shifts to 5 / 6.
    assert abs(float(jnp.median(times)) - 5 / 6) < 0.02
    assert shifted(jnp.array([0.0, 1.0]), 5.0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_eight_devices_compute_what_one_does(kind):
    model, given = model_of(attention=COARSE, batch_axes=("data",)), batch(8)
    wanted = gradients(model, given)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    with jax.set_mesh(mesh):
        found = gradients(model, jax.device_put(given, NamedSharding(mesh, P("data"))))
    for got, one in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, one, atol=1e-5)


def test_steps_follow_the_velocities():
    """One step goes from noise along its velocity; guidance of 1 is none."""
    model, text = model_of(), batch().text
    got = sample(model, text, jax.random.key(3), steps=2, shift=1.0)
    x = jax.random.normal(jax.random.key(3), got.shape)
    for time in (1.0, 0.5):
        x = x - 0.5 * model(x, text, jnp.full(2, time))
    np.testing.assert_allclose(got, x, atol=1e-5)
    guided = sample(
        model, text, jax.random.key(3), steps=2, shift=1.0, guidance=3.0, other_text=text
    )
    np.testing.assert_allclose(guided, got, atol=1e-4)  # both texts are the same


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dataclasses.replace(SMALL, patch=(1, 3, 2)), r"patch=\(1, 3, 2\) must divide"),
        (lambda: TiledAttention(windows=(None, (1, 1, 1))), r"until=\(\) must be 1 ascending"),
        (
            lambda: dataclasses.replace(SMALL, attention=TiledAttention(tile=(3, 2, 2))),
            "do not divide a grid of 4 x 4 x 6",
        ),
        (lambda: dataclasses.replace(SMALL, head_dim=33), "must be even"),
        (lambda: sample(model_of(), batch().text, jax.random.key(0), steps=0), "steps=0"),
        (lambda: sample(model_of(), batch().text, jax.random.key(0), shift=0.0), "shift=0"),
        (
            lambda: sample(model_of(), batch().text, jax.random.key(0), guidance=2.0),
            "needs the states of another text",
        ),
        (
            lambda: model_of()(jnp.zeros((2, 4, 8, 8, 3)), batch().text, jnp.zeros(2)),
            r"takes latents \[B, 4, 8, 12, 3\]",
        ),
        (lambda: model_of()(*batch()[:2], 0.5), r"time \[B\], not .* and \(\)"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call, message):
    with pytest.raises((UserError, ValueError), match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_every_pair_of_a_head_has_an_angle_of_one_axis():
    """Heads of 128: 22 pairs of time, 21 of height, 21 of width, as in Wan 2.1."""
    from coat_jax.models.video.model import _angles

    config = dataclasses.replace(SMALL, head_dim=128)
    cos, _ = _angles(config)
    grid = cos.reshape(*config.grid, 64)
    for axis, pairs in enumerate((slice(0, 22), slice(22, 43), slice(43, 64))):
        others = tuple(i for i in range(3) if i != axis)
        moved = np.moveaxis(grid[..., pairs], others, (0, 1)).reshape(
            -1, config.grid[axis], pairs.stop - pairs.start
        )
        assert np.all(moved == moved[:1])
    assert len({*itertools.chain(cos[-1])}) > 1
