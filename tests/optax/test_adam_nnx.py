"""fp8_adamw under nnx.Optimizer, which shards each leaf of a state by its annotations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from coat_jax.optax import Storage, fp8_adamw


def test_the_state_is_sharded_as_the_parameters():
    """Flax gives scales their parameter's PartitionSpec, so a device holds whole groups."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"up": PartitionSpec(None, "x"), "down": PartitionSpec("x", None)}
    drawn = np.float32(np.random.default_rng(0).standard_normal((64, 512)))
    tx = fp8_adamw(1e-3, storage=Storage(group_size=64))
    with jax.set_mesh(mesh):
        model = nnx.Dict({n: nnx.Param(drawn, out_sharding=spec) for n, spec in specs.items()})
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        update = nnx.jit(lambda optimizer, model, grads: optimizer.update(model, grads))
        update(optimizer, model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    adam = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"][0]
    for moment, dtype in (("mu", jnp.int8), ("nu", jnp.uint8)):
        for name, spec in specs.items():
            codes, amax, exponent_x16 = (
                adam[moment][part][name] for part in ("codes", "amax", "exponent_x16")
            )
            assert codes.dtype == dtype
            assert amax.shape == (64, 8)
            for leaf in (codes, amax, exponent_x16, model[name][...]):
                assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    # A first step goes the learning rate against the gradient's sign, and decays by 1e-4 of that.
    np.testing.assert_allclose(model["up"][...], drawn - 1e-3 - 1e-7 * drawn, rtol=1e-5, atol=1e-6)


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
    for scales in (mu.amax, mu.exponent_x16):
        assert scales["w"].get_metadata()["out_sharding"] == ("mlp", "layers", None)
        assert scales["wide"].get_metadata()["out_sharding"] == names["out_sharding"]
