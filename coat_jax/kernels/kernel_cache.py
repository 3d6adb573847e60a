"""Caches compiled Triton kernels in files, so that not every process compiles them again.

jax-triton compiles a kernel whenever a program that launches it is lowered, even where JAX's
compilation cache has the program. That takes seconds for the kernels of a model. So the compiled
launch is stored in a file beside JAX's entries, in `triton/` of `jax_compilation_cache_dir`.

    name    a hash of the kernel's source, its constants, the arrays, the GPU and all versions
    file    SHA-256 of the rest, and the custom call's configuration

A file that is damaged or cannot be read is rewritten.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from coat_jax.errors import UserError

# JAX has two custom calls that launch Triton kernels. A CUDA graph can contain only this one.
# jax-triton below 0.4 uses the other one, with which every kernel would end a graph.
TARGET = "triton_kernel_call_ffi"
# a * b + c is one instruction, as by default until Triton 3.9.
FUSED: dict[str, Any] = {"enable_fp_fusion": True}
# Of CUDA 12.9, which knows all GPUs from Ada to Blackwell. By default Triton writes the PTX of the
# CUDA that it comes with, which may be newer than that of the machine.
PTX = 88
LAYOUT = 3  # of the files; files of another layout are not read

triton_kernel = Primitive("triton_kernel")
triton_kernel.multiple_results = True


@triton_kernel.def_abstract_eval
def _types(*arrays: Any, outputs: Sequence[jax.ShapeDtypeStruct], **call: Any) -> Any:
    del arrays, call
    return [jax.core.ShapedArray(output.shape, output.dtype) for output in outputs]


@triton_kernel.def_impl
def _run(*arrays: jax.Array, **call: Any) -> Any:
    return jax.jit(functools.partial(triton_kernel.bind, **call))(*arrays)


def _lower(context: Any, *operands: Any, **call: Any) -> Any:
    """The custom call, with the compiled kernel from its file or else from jax-triton."""
    import jax_triton  # noqa: F401  # registers the target

    path = _path(context.avals_in, call)
    compiled = None if path is None else read(path)
    if compiled is None:
        compiled = _compile(context, operands, call)
        if path is not None:
            write(path, compiled)
    lower = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=dict(call["aliases"]))
    return lower(context, *operands, name=call["kernel"].__name__, opaque=compiled)


def _compile(context: Any, operands: Sequence[Any], call: dict[str, Any]) -> bytes:
    """The configuration of jax-triton's custom call: the compiled kernel and its launch."""
    lower = mlir.lower_fun(functools.partial(_through_jax_triton, **call), multiple_results=True)
    made = lower(context, *operands)[0].owner
    if "mhlo.backend_config" in made.attributes:  # from jax-triton 0.4 on
        opaque = made.attributes["mhlo.backend_config"]["opaque"]
    else:
        opaque = made.attributes["backend_config"]
    configuration: bytes = opaque.value_bytes
    made.erase()
    return configuration


mlir.register_lowering(triton_kernel, _lower, platform="cuda")


def _refuse(context: Any, *operands: Any, **call: Any) -> Any:
    del operands, call
    platforms = ", ".join(context.module_context.platforms)
    raise UserError(
        'implementation="triton" runs kernels on an NVIDIA GPU, and this program is compiled for '
        f"{platforms}. Leave implementation out: XLA computes the same."
    )


# For all other platforms. The platform is known only when a program is lowered: on a machine
# without a GPU, it may be compiled for one ahead of time.
mlir.register_lowering(triton_kernel, _refuse)


def _through_jax_triton(
    *arrays: jax.Array,
    kernel: Any,
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: Sequence[tuple[int, int]],
    programs: int,
    warps: int,
    stages: int,
    capability: int,
    constants: Sequence[tuple[str, Any]],
) -> Any:
    import jax_triton

    del aliases  # `_lower` states them: to the kernel, inputs and outputs are separate pointers
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:  # jax-triton 0.4
        by_version = {"out_type": list(outputs), "backend_options": {"ptx_version": PTX, **FUSED}}
    else:
        by_version = {"out_shape": list(outputs), **FUSED}
    return jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        grid=(programs,),
        num_warps=warps,
        num_stages=stages,
        compute_capability=capability,
        **by_version,
        **dict(constants),
    )


def _path(inputs: Sequence[Any], call: dict[str, Any]) -> Path | None:
    """The file of the compiled launch; None without a compilation cache on this machine."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if folder is None or "://" in folder or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    kernel = call["kernel"]
    arrays = [(a.shape, a.dtype.name) for a in (*inputs, *call["outputs"])]
    fixed = {name: value for name, value in call.items() if name not in ("kernel", "outputs")}
    how = (LAYOUT, *_versions())
    described = repr((kernel.cache_key, arrays, sorted(fixed.items()), how))
    digest = hashlib.sha256(described.encode()).hexdigest()[:32]
    return Path(folder) / "triton" / f"{kernel.__name__}-{digest}"


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(importlib.metadata.version(name) for name in ("jaxlib", "jax-triton", "triton"))


def read(path: Path) -> bytes | None:
    """The configuration in a file; None if there is no such file or its checksum is wrong."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, rest = content[:32], content[32:]
    return rest if hashlib.sha256(rest).digest() == checksum else None


def write(path: Path, configuration: bytes) -> None:
    """Writes a file atomically. If the folder cannot be written to, nothing happens."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(hashlib.sha256(configuration).digest() + configuration)
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
