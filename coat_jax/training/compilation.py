"""How a run is compiled: XLA's options, a variable of CUDA, and JAX's compilation cache.

On several GPUs, collectives run while layers compute:

    latency hiding scheduler    starts a collective as early, and waits for it as late, as it can
    collective kernels          none, so that NCCL also reduces small arrays: XLA schedules products
                                beside kernels of its own that could hide a larger collective
    joined reduce-scatters      up to 128 MB: a few for each layer instead of one for each weight
    one queue                   kernels start in the order in which XLA launches them, so that a
                                collective does not start after the products that should hide it

An offloaded optimizer's state is copied in both directions at once. FP8 training has no Triton
GEMMs: for each product in INT8 or BF16 (the head's, and forward ones that are not FP8), XLA would
spend seconds compiling and timing dozens of its own kernels, and cuBLAS is as fast. A BF16 run has
only such products, and leaves the choice to XLA. XLA_FLAGS and a variable that is set come first.

With the cache, a restarted run does not compile its step again. JAX warns of an entry that it
cannot read, as one is that a full disk has cut off, and never replaces it: delete that entry.
"""

import os
import subprocess
import warnings
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.optax.states.host_memory import COPIES_AT_ONCE
from coat_jax.precision import precision_of
from coat_jax.training.config import TrainConfig
from coat_jax.training.config.run import CACHE

Options = dict[str, bool | int | str]

# JAX 0.11.1 replaced the option for all-reduces by a list of collectives.
NO_COLLECTIVE_KERNELS: Options = (
    {"xla_gpu_experimental_use_collective_kernels": ""}
    if jax.__version_info__ >= (0, 11, 1)
    else {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": False}
)
COMMUNICATION: Options = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 128 << 20,
    **NO_COLLECTIVE_KERNELS,
}
NO_TRITON_GEMM: Options = {"xla_gpu_enable_triton_gemm": False}
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
HOPPER = "9.0"  # a compute capability
PATIENCE = 30  # seconds for nvidia-smi, which may hang where the driver does


def compiler_options(config: TrainConfig, mesh: Mesh) -> Options:
    """Returns the options for the programs of a run, except those that XLA_FLAGS sets."""
    options: Options = {}
    if mesh.devices.flat[0].platform in ("gpu", "cuda"):
        options |= COMMUNICATION if mesh.size > 1 else {}
        options |= COPIES_AT_ONCE if config.optimizer.offload else {}
        options |= NO_TRITON_GEMM if precision_of(config.model.precision).fp8_linear else {}
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if f"--{name}=" not in given}


def use_one_queue(*, offload: bool = False) -> None:
    """Has CUDA start all kernels through one queue, if all GPUs are Hoppers.

    CUDA reads the variable when it starts, so call this before JAX looks for devices. For Blackwell
    NVIDIA advises against it. With `offload`, an optimizer's state is copied in streams of its own,
    which keep CUDA's queues.
    """
    if offload or QUEUES in os.environ:
        return
    if set(query_gpus("compute_cap")) == {HOPPER}:
        os.environ[QUEUES] = "1"


def query_gpus(field: str) -> list[str]:
    """Returns a field of `nvidia-smi --help-query-gpu` for each GPU; nothing if it fails.

    JAX would start CUDA on the GPUs.
    """
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=PATIENCE
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines()]


def use_cache(folder: str | None, note: Callable[[str], object] = warnings.warn) -> None:
    """Makes JAX store compiled programs in a folder, unless JAX is configured to use another one.

    Call it before anything is compiled. URLs such as gs://bucket/cache are passed to JAX as they
    are. A folder that cannot be written is refused, but `note` is called with a line if it is the
    default one.
    """
    if folder is None:
        return
    # See coat_jax.kernels.sharding.
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
    if jax.config.values["jax_compilation_cache_dir"]:  # or JAX_COMPILATION_CACHE_DIR
        return
    place = folder
    if "://" not in folder:
        path = expand_user(folder)
        place = str(path)
        # JAX only warns if it cannot write, after it has compiled the first program.
        there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            lacks = "writable" if there.is_dir() else "a folder"
            problem = f"The compilation cache {path} cannot be used: {there} is not {lacks}."
            if folder != CACHE:
                raise UserError(f"{problem} Choose another --cache, or none: --cache none.")
            note(f"{problem} Every start compiles anew.")
            return
    jax.config.update("jax_compilation_cache_dir", place)
