"""Collectives that run while layers compute: XLA's options, and a variable of CUDA.

    latency hiding scheduler    starts a collective as early, and waits for it as late, as it can
    collective kernels          none, so that NCCL also reduces small arrays: XLA schedules products
                                beside kernels of its own that could hide a larger collective
    joined reduce-scatters      up to 128 MB: a few for each layer instead of one for each weight
    one queue                   kernels start in the order in which XLA launches them, so that a
                                collective does not start after the products that should hide it

An option that XLA_FLAGS sets, and a variable that is already set, keep their values.
"""

import os

import jax
from jax.sharding import Mesh

from coat_jax import nvidia

Options = dict[str, bool | int | str]

# JAX 0.11.1 replaced the option for all-reduces by a list of collectives.
NO_COLLECTIVE_KERNELS: Options = (
    {"xla_gpu_experimental_use_collective_kernels": ""}
    if jax.__version_info__ >= (0, 11, 1)
    else {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": False}
)
OPTIONS: Options = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 128 << 20,
    **NO_COLLECTIVE_KERNELS,
}
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
HOPPER = "9.0"  # a compute capability


def communication_options(mesh: Mesh) -> Options:
    """Returns the options for a mesh of several GPUs; none for one device, or for other devices."""
    if mesh.size == 1 or mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    return OPTIONS


def use_one_queue(*, offload: bool = False) -> None:
    """Has CUDA start all kernels through one queue, if all GPUs are Hoppers.

    CUDA reads the variable when it starts, so call this before JAX looks for devices. For Blackwell
    NVIDIA advises against it. With `offload`, an optimizer's state is copied in streams of its own,
    which keep CUDA's queues.
    """
    if offload or QUEUES in os.environ:
        return
    if set(nvidia.query_gpus("compute_cap")) == {HOPPER}:
        os.environ[QUEUES] = "1"
