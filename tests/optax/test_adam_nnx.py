"""fp8_adamw under nnx.Optimizer: Flax's own training loop, on one device and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from coat_jax.optax import Storage, fp8_adamw

WIDTH, HIDDEN = 128, 1024


class MLP(nnx.Module):
    def __init__(self, rngs, *, sharded):
        def init(*names):
            lecun = nnx.initializers.lecun_normal()
            return {"kernel_init": nnx.with_partitioning(lecun, names) if sharded else lecun}

        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs, **init(None, "x"))
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs, **init("x", None))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@nnx.jit
def train(model, optimizer, x):
    def loss_of(model):
        return jnp.mean(jnp.square(model(x) - jnp.roll(x, 1, axis=-1)))

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def run(tx, *, sharded=False):
    """The parameters, the moments and the losses after some steps."""
    model = MLP(nnx.Rngs(0), sharded=sharded)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jnp.float32(np.random.default_rng(0).standard_normal((32, WIDTH)))
    losses = [float(train(model, optimizer, x)) for _ in range(4)]
    return jax.tree.leaves(nnx.state(model, nnx.Param)), moments(optimizer), losses


def moments(optimizer):
    state = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"][0]
    return [state["mu"], state["nu"]]


def test_on_a_mesh_state_is_sharded_as_the_parameters_and_results_are_the_same():
    """And the model learns as with optax."""
    plain, _, losses = run(fp8_adamw(1e-3))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        params, stored, sharded_losses = run(fp8_adamw(1e-3), sharded=True)
    for moment, dtype in zip(stored, (jnp.int8, jnp.uint8), strict=True):
        for part in ("codes", "amax", "k16"):
            assert moment[part]["up"]["kernel"].sharding.spec == PartitionSpec(None, "x")
            assert moment[part]["down"]["kernel"].sharding.spec[0] == "x"
        assert moment["codes"]["up"]["kernel"].dtype == dtype
        assert moment["codes"]["up"]["bias"].dtype == jnp.float32
    # Sums over the mesh are added in another order. A moment on the edge between two codes may
    # then round the other way, which changes its element's step, of at most the learning rate.
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-4)
    for a, b in zip(params, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)
        assert np.mean(np.abs(a - b)) < 1e-6
    # Rounding moves a parameter some percent otherwise, so the loss's fall differs by less.
    *_, theirs = run(optax.adamw(1e-3))
    np.testing.assert_allclose(losses, theirs, rtol=0.01)


def test_smaller_groups_let_a_mesh_shard_the_last_axis_finer():
    """Flax gives scales their parameter's PartitionSpec, so a device holds whole groups."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        model = nnx.Dict(w=nnx.Param(jnp.ones((64, 512)), out_sharding=(None, "x")))
        tx = fp8_adamw(1e-3, storage=Storage(group_size=64))
        amax = moments(nnx.Optimizer(model, tx, wrt=nnx.Param))[0]["amax"]["w"]
    assert (amax.shape, amax.sharding.spec) == ((64, 8), PartitionSpec(None, "x"))


@pytest.mark.filterwarnings("ignore:'sharding_names' is deprecated")
def test_scales_fit_names_that_are_mapped_to_a_mesh_later():
    """As in MaxText, whose stacked layers have the names twice. No mesh is set here."""
    names = {"out_sharding": ("mlp", "layers", "embed")}
    with nnx.use_eager_sharding(False):
        kernel = nnx.Param(jnp.ones((128, 2, 512)), **names)
        kernel._var_metadata["sharding_names"] = names["out_sharding"]
        wide = nnx.Param(jnp.ones((128, 2, 1024)), **names)
        model = nnx.Dict(w=kernel, wide=wide)
        mu = nnx.Optimizer(model, fp8_adamw(1e-3), wrt=nnx.Param).opt_state[0].mu
    assert jax.device_count() == 8
    assert mu.codes["w"].get_metadata()["out_sharding"] == names["out_sharding"]
    # 4 groups of 128 cannot be divided by 8 devices, and 8 can.
    for scales in (mu.amax, mu.k16):
        assert scales["w"].get_metadata()["out_sharding"] == ("mlp", "layers", None)
        assert scales["wide"].get_metadata()["out_sharding"] == names["out_sharding"]
