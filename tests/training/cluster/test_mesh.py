"""The mesh is what the config says, or an error that says why not."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest
from train_cases import mesh_of, small

from coat_jax.errors import UserError
from coat_jax.training.cluster.mesh import make_mesh, open_data, share_of_process
from coat_jax.training.config import MeshConfig


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (MeshConfig(), (1, 8, 1, 1)),
        (MeshConfig(data=-1, fsdp=2, tensor=2), (2, 2, 1, 2)),
        (MeshConfig(data=2, fsdp=1, expert=2, tensor=-1), (2, 1, 2, 2)),
        (MeshConfig(data=8, fsdp=1, tensor=1), (8, 1, 1, 1)),
    ],
)
def test_one_axis_takes_the_devices_that_are_left(config, sizes):
    mesh = make_mesh(config)
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert dict(mesh.shape) == dict(zip(("data", "fsdp", "expert", "tensor"), sizes, strict=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(data=3, fsdp=1), "fsdp=1, expert=1, tensor=1 needs 3 devices, and JAX finds 8"),
        (MeshConfig(data=3), "data=3, fsdp=-1, .*=1 needs a multiple of 3 devices, and JAX"),
        (MeshConfig(data=16), "needs a multiple of 16 devices, and JAX finds 8"),
        (MeshConfig(data=-1), "data=-1, fsdp=-1, .* only one may be -1"),
    ],
)
def test_a_mesh_that_does_not_match_the_devices_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(config)


def test_a_batch_that_the_devices_cannot_share_is_refused_with_a_remedy():
    config = small(global_batch_size=12, gradient_accumulation_steps=3)
    message = r"4 sequences at a time, which 8 devices .*global_batch_size a multiple of 24\."
    with pytest.raises(UserError, match=message):
        open_data(config, make_mesh(MeshConfig()), "train")
    open_data(dataclasses.replace(config, global_batch_size=24), make_mesh(MeshConfig()), "train")


def shares(sizes, here):
    """The share of a process whose devices these are, by number."""
    mesh = mesh_of(sizes)
    local = [device for device in mesh.devices.flat if device.id in here]
    mesh = SimpleNamespace(devices=mesh.devices, shape=mesh.shape, local_devices=local)
    return share_of_process(mesh)


def test_a_process_loads_the_rows_of_its_devices():
    assert shares((1, 8, 1), range(8)) == (0, 1)
    assert shares((1, 8, 1), range(4, 8)) == (1, 2)
    assert shares((2, 2, 2), {4, 5}) == (2, 4)
    # Four devices share each row, two processes their rows.
    assert shares((2, 1, 4), {2, 3}) == (0, 2)
    assert shares((2, 1, 4), {4, 5}) == (1, 2)
    with pytest.raises(ValueError, match=r"at places \[0, 7\] of the 8 .* not an equal part"):
        shares((1, 8, 1), {0, 7})
