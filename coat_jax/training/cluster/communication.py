"""XLA's options for a step on several GPUs: collectives run while layers compute.

    latency hiding scheduler    starts a collective as early, and waits for it as late, as it can
    collective kernels          none, so that NCCL also reduces small arrays: XLA schedules products
                                beside kernels of its own that could hide a larger collective
    async compute limit         lets copies to and from host memory run beside collectives

An option that XLA_FLAGS already sets is left as it is there.
"""

import os

import jax
from jax.sharding import Mesh

Options = dict[str, bool | int | str]

# JAX 0.11.1 replaced the option for all-reduces by a list of collectives.
NO_COLLECTIVE_KERNELS: Options = (
    {"xla_gpu_experimental_use_collective_kernels": ""}
    if jax.__version_info__ >= (0, 11, 1)
    else {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": False}
)
OPTIONS: Options = {"xla_gpu_enable_latency_hiding_scheduler": True, **NO_COLLECTIVE_KERNELS}
# The scheduler counts copies that have streams of their own, finds too many, and fails.
WITH_COPIES: Options = {"xla_gpu_experimental_parallel_async_compute_limit": 1000}


def communication_options(mesh: Mesh, *, offload: bool = False) -> Options:
    """The options for a mesh of several GPUs; none for one device, or for other devices.

    Args:
        mesh: of the program.
        offload: whether the program moves an optimizer's state to host memory and back.
    """
    if mesh.size == 1 or mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    given = os.environ.get("XLA_FLAGS", "")
    options = OPTIONS | WITH_COPIES if offload else OPTIONS
    return {name: value for name, value in options.items() if f"--{name}=" not in given}
