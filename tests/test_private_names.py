"""Names of other libraries that are not public and that coat_jax uses all the same.

A test that fails here names the file that a release of the library has broken.
"""

import jax.numpy as jnp
import numpy as np


def test_orbax_keeps_each_array_under_its_keys_joined_by_dots(tmp_path):
    """`coat_jax/training/checkpoint/weights.py` reads arrays from there, a part at a time."""
    import orbax.checkpoint as ocp
    import tensorstore

    array = jnp.arange(6.0).reshape(2, 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"layers": {"0": {"w": array}}})
    path = (tmp_path / "state").as_uri()
    kvstore = {"driver": "ocdbt", "base": path, "path": "layers.0.w/"}
    opened = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, read=True).result()
    np.testing.assert_array_equal(opened[1:].read().result(), array[1:])
