"""XLA's options for the programs of a run: those for communication, and two more.

    copies at once     of optimizer state in host memory, in both directions
    no Triton GEMMs    in FP8 training

For each product in INT8 or BF16, XLA would spend seconds compiling and timing dozens of its own
Triton kernels. In FP8 training these are the forward products of COAT_INT8 and the products of the
head, which cuBLAS computes as fast. A BF16 run leaves the choice to XLA: all of its products are of
this kind, and some may gain.
"""

import os

from jax.sharding import Mesh

from coat_jax.optax.states.host_memory import COPIES_AT_ONCE
from coat_jax.precision import precision_of
from coat_jax.training.cluster.communication import Options, communication_options
from coat_jax.training.config import TrainConfig

NO_TRITON_GEMM: Options = {"xla_gpu_enable_triton_gemm": False}


def compiler_options(config: TrainConfig, mesh: Mesh) -> Options:
    """Returns the options for the programs of a run, except those that XLA_FLAGS sets."""
    options = communication_options(mesh)
    if mesh.devices.flat[0].platform in ("gpu", "cuda"):
        if config.optimizer.offload:
            options = options | COPIES_AT_ONCE
        if precision_of(config.model.precision).fp8_linear:
            options = options | NO_TRITON_GEMM
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if f"--{name}=" not in given}
