"""Leaves debugging information out of compiled kernels, which makes programs several times smaller.

XLA stores a copy of the compiled kernel with each launch, and a step of a large model launches over
a thousand. Most of a kernel, as Triton and jax-triton compile it, serves to debug it:

    line numbers    where each instruction comes from, in PTX
    Triton's IR     the kernel before it was compiled; nothing reads it

The instructions are the same without. Profilers show a kernel's name in either case. To see its
source there, too, set TRITON_DISABLE_LINE_INFO=0 and JAX_TRITON_PTXAS_EXTRA_FLAGS=-lineinfo.
"""

import contextlib
import os
import zlib
from collections.abc import Iterator

_VARIABLE = "TRITON_DISABLE_LINE_INFO"  # Triton's own; whoever sets it decides
# jaxlib's TritonAnyKernelCall.kernel_call.kernel.ttir, as numbers of fields in protocol buffers.
_TRITON_IR = (1, 1, 5)
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # how the value of a field is encoded


def line_numbers() -> str:
    """Whether kernels are compiled with line numbers: Triton's variable, "1" for not by default."""
    return os.environ.get(_VARIABLE, "1")


@contextlib.contextmanager
def without_line_numbers() -> Iterator[None]:
    """Triton compiles without line numbers meanwhile, unless its variable says otherwise."""
    import triton

    if _VARIABLE in os.environ:
        yield
        return
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        yield


def without_triton_ir(configuration: bytes) -> bytes:
    """The configuration of jax-triton's custom call, a compressed message, without Triton's IR."""
    return zlib.compress(_without(zlib.decompress(configuration), _TRITON_IR))


def _without(message: bytes, path: tuple[int, ...]) -> bytes:
    """A message in protocol buffers without the field to which the path of numbers leads."""
    kept, at = b"", 0
    while at < len(message):
        start = at
        tag, at = _read_varint(message, at)
        number, encoding = tag >> 3, tag & 7
        if encoding == _LENGTH:
            length, at = _read_varint(message, at)
            inside, at = message[at : at + length], at + length
            if number == path[0]:
                if len(path) > 1:
                    shorter = _without(inside, path[1:])
                    kept += _varint(tag) + _varint(len(shorter)) + shorter
                continue
        elif encoding == _VARINT:
            _, at = _read_varint(message, at)
        else:
            at += {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}[encoding]
        kept += message[start:at]
    return kept


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """A number, seven bits to a byte with the lowest first, and where the next field starts."""
    number = shift = 0
    while True:
        byte = message[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def _varint(number: int) -> bytes:
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])
