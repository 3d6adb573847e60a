"""Compiles programs for an H100 on a machine that has none, and reads what came out."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def hopper_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    """A mesh of 4 H100s that do not exist."""
    description = (Path(__file__).parent / "h100.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology="1x1x4"
    )
    return topologies.make_mesh(topo=topology, mesh_shape=shape, axis_names=names)


def can_compile_for_hopper() -> bool:
    """Whether XLA's CUDA plugin is installed."""
    try:
        hopper_mesh((4,), ("x",))
    except (NotImplementedError, RuntimeError, ImportError):
        return False
    return True


def compile_for(mesh: jax.sharding.Mesh, function: Callable, *args: Any, **jit: Any) -> Any:
    """The program of `function` for `mesh`; args are ShapeDtypeStructs with shardings."""
    with jax.set_mesh(mesh):
        return jax.jit(function, **jit).lower(*args).compile()


def collectives(compiled: Any) -> list[str]:
    """The names of the collectives in a program."""
    return COLLECTIVE.findall(compiled.as_text())


def kernel_calls(compiled: Any) -> int:
    """How many Triton kernels a program launches."""
    return compiled.as_text().count('custom_call_target="triton_kernel_call"')


def copies(compiled: Any) -> int:
    """How many copies of arrays (not scalars) a program makes."""
    return len(re.findall(r"= \w+\[\d\S* copy(?:-start)?\(", compiled.as_text()))
