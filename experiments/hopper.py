"""Compiles programs for H100s on a machine that has none: XLA's CUDA plugin is enough.

with there():
    program = compile_for(hopper_mesh((4,), ("x",)), function, *arguments)
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self
from unittest import mock

# XLA's CUDA plugin looks for CUDA's libraries, which compiling does not need.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding

from coat_jax.kernels import dispatch
from coat_jax.optax.states import sharding
from coat_jax.optax.states.host_memory import KIND
from coat_jax.training.cluster.mesh import NAMES, batch_parts
from coat_jax.training.config import TrainConfig
from coat_jax.training.report import accounting
from coat_jax.training.setup import prepare
from coat_jax.training.step import State

# Without a GPU XLA does not time its choices, and would take its own Triton GEMMs. It also merges
# small products that share an operand; those of larger models it leaves apart.
OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
CHECK = "_maybe_get_and_check_out_shardings"  # the name of a function in JAX's `pxla`


def hopper_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    """A mesh of H100s that do not exist."""
    description = (Path(__file__).parent / "h100.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology=f"1x1x{math.prod(shape)}"
    )
    return topologies.make_mesh(topo=topology, mesh_shape=shape, axis_names=names)


def compile_for(mesh: jax.sharding.Mesh, function: Callable, *args: Any, **jit: Any) -> Any:
    """The program of `function` for `mesh`; args are ShapeDtypeStructs with shardings."""
    with jax.set_mesh(mesh):
        return jax.jit(function, **jit).lower(*args).compile()


def compile_step(
    config: TrainConfig, sizes: tuple[int, ...]
) -> tuple[Any, accounting.DeviceMemory, State]:
    """The trainer's step on a mesh of `sizes`, what it takes of each GPU, the state's shapes.

    The sizes are those of data, fsdp, tensor and, if given, expert.
    """
    data, fsdp, tensor, expert = (*sizes, 1)[:4]
    mesh = hopper_mesh((data, fsdp, expert, tensor), NAMES)
    prepared = prepare(config, mesh)
    program = prepared.lower().compile(compiler_options=OPTIONS)
    memory = accounting.account(
        config, prepared.abstract, program, batch_parts=batch_parts(mesh), device=_NoDevice()
    )
    return program, memory, prepared.abstract


def memory_of(config: TrainConfig, gpus: int = 1) -> dict[str, Any]:
    """Bytes that the trainer's step takes of each GPU, with parameters sharded over all of them."""
    with there():
        _, memory, _ = compile_step(config, (1, gpus, 1))
    return memory._asdict()


class _NoDevice:
    """A device that reports no memory."""

    def memory_stats(self) -> None:
        return None


class _OnHosts(NamedSharding):
    """A sharding in host memory. A NamedSharding would ask its devices, which do not exist."""

    @classmethod
    def like(cls, other: NamedSharding) -> Self:
        return cls(other.mesh, other.spec)

    @property
    def memory_kind(self) -> str:
        return KIND

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OnHosts) and (self.mesh, self.spec) == (other.mesh, other.spec)

    def __hash__(self) -> int:
        return hash((self.mesh, self.spec, KIND))


def _out_shardings(check: Callable) -> Callable:
    """JAX's check of a program's results, which knows nothing of the memory of these hosts."""

    def checked(executable: Any, shardings: Any, *arguments: Any) -> Any:
        there = [isinstance(one, _OnHosts) for one in shardings]
        on_devices = [
            NamedSharding(one.mesh, one.spec) if host else one
            for one, host in zip(shardings, there, strict=True)
        ]
        found = check(executable, on_devices, *arguments)
        return [a if host else b for a, b, host in zip(shardings, found, there, strict=True)]

    return checked


@contextlib.contextmanager
def there() -> Iterator[None]:
    """Inside, JAX and coat_jax choose what they would choose on these GPUs."""
    from jax._src.cudnn import fused_attention_stablehlo as attention
    from jax._src.interpreters import pxla

    with (
        mock.patch.object(attention, "check_cudnn_version", return_value=91000),
        mock.patch.object(attention, "check_compute_capability", return_value=True),
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        mock.patch.object(dispatch, "gpu_capability", return_value=dispatch.HOPPER),
        mock.patch.object(sharding, "host_sharding", _OnHosts.like),
        mock.patch.object(pxla, CHECK, _out_shardings(getattr(pxla, CHECK))),
    ):
        yield
