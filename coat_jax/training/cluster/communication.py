"""XLA's options for a step on several GPUs: collectives run while layers compute.

    latency hiding scheduler    starts a collective as early, and waits for it as late, as it can
    combine thresholds          joins the collectives of neighbouring layers into larger ones
    async compute limit         lets copies to and from host memory run beside collectives

An option that XLA_FLAGS already sets is left as it is there.
"""

import os

from jax.sharding import Mesh

_MB = 1 << 20
OPTIONS: dict[str, bool | int] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_gather_combine_threshold_bytes": 128 * _MB,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 256 * _MB,
}
# The scheduler counts copies that have streams of their own, finds too many, and fails.
WITH_COPIES: dict[str, bool | int] = {"xla_gpu_experimental_parallel_async_compute_limit": 1000}


def communication_options(mesh: Mesh, *, offload: bool = False) -> dict[str, bool | int]:
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
