"""Reads what was compiled for an H100 on a machine that has none."""

import re
import subprocess
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest

from coat_jax.kernels.kernel_cache import TARGET
from coat_jax.optax import state_shardings
from experiments.hopper import compile_for, hopper_mesh

KERNEL_CALL = f'custom_call_target="{TARGET}"'
ESCAPE = re.compile(rb"\\(\\|[0-9A-F]{2})")  # of a byte in a program's text
COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def can_compile_for_hopper() -> bool:
    """Whether XLA's CUDA plugin is installed."""
    try:
        hopper_mesh((4,), ("x",))
    except (NotImplementedError, RuntimeError, ImportError):
        return False
    return True


# Of a module of such tests.
COMPILED = [
    pytest.mark.compiled,
    pytest.mark.skipif(
        not (can_compile_for_hopper() and find_spec("jax_triton")),
        reason="needs XLA's CUDA plugin and jax-triton",
    ),
]


def sharded_structs(shapes: Any, shardings: Any, dtype: Any = None) -> Any:
    """A tree of ShapeDtypeStructs with these shardings, of another dtype if one is given."""
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, dtype or a.dtype, sharding=s), shapes, shardings
    )


def compile_step_in_place(
    mesh: Any, optimizer: Any, params: Any, grads: Any = None, **jit: Any
) -> Any:
    """The program of an optimizer's step, all but gradients donated."""
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(optimizer.init, params)
        state = sharded_structs(shapes, state_shardings(optimizer, params))
    grads = params if grads is None else grads
    return compile_for(mesh, optimizer.step, params, grads, state, donate_argnums=(0, 2), **jit)


def collectives(compiled: Any) -> list[str]:
    """The names of the collectives in a program."""
    return COLLECTIVE.findall(compiled.as_text())


def kernel_calls(compiled: Any) -> int:
    """How many Triton kernels a program launches."""
    return compiled.as_text().count(KERNEL_CALL)


def copies(compiled: Any) -> int:
    """How many copies of arrays (not scalars) a program makes."""
    return len(re.findall(r"= \w+\[\d\S* copy(?:-start)?\(", compiled.as_text()))


def kernels(compiled: Any) -> list[str]:
    """The PTX of the Triton kernels in a program."""
    found = []
    for escaped in re.findall(r'\bopaque = "([^"]*)"', compiled.as_text()):
        call = zlib.decompress(ESCAPE.sub(_unescaped, escaped.encode()))
        (ptx,) = re.findall(rb"\.version[\t\n\r\x20-\x7e]*\}", call)
        found.append(ptx.decode())
    return found


def _unescaped(match: re.Match[bytes]) -> bytes:
    return b"\\" if match[1] == b"\\" else bytes.fromhex(match[1].decode())


def spilled_bytes(ptx: str, folder: Path) -> int:
    """The bytes that each thread of a kernel keeps outside of registers, as ptxas assembles it.

    Products must overlap, for which ptxas needs to see where their sums are defined.
    """
    import triton

    (folder / "kernel.ptx").write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [ptxas, "-arch=sm_90a", "-v", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert "wgmma.mma_async instructions are serialized" not in done.stderr
    (stores,) = re.findall(r"(\d+) bytes spill stores", done.stderr)
    return int(stores)


def timeline(compiled: Any) -> list[str]:
    """The kernels, products and copies to and from host memory of a program, in their order.

    A copy of an array has its beginning, "+to host", and its end, "-to host"; "kernel" is one of
    Triton, "product" one of cuBLAS.
    """
    text = compiled.as_text()
    found = []
    for line in text[text.index("\nENTRY ") :].splitlines():
        if copy := re.search(r"= \(?\w+\[\d\S*?\{([^}]*)\}.* copy-(start|done)\(", line):
            sign = "+" if copy[2] == "start" else "-"
            found.append(sign + ("to host" if "S(5)" in copy[1] else "to device"))
        elif KERNEL_CALL in line and " custom-call(" in line:
            found.append("kernel")
        elif re.search(r'custom_call_target="__cublas\$', line):
            found.append("product")
    return found
