"""Leaves debugging information out of compiled kernels, so that programs are compiled faster.

XLA stores a copy of the kernel with each of its launches, and the step of a large model has over a
thousand. More than half of a kernel that jax-triton has compiled is there for debugging alone:

    line numbers    the line of the source from which each instruction of the PTX comes
    Triton's IR     the kernel as it was before compilation; nothing reads it

The instructions stay the same, and profilers still show the name of a kernel. For its source in a
profiler, set TRITON_DISABLE_LINE_INFO=0 and JAX_TRITON_PTXAS_EXTRA_FLAGS=-lineinfo.
"""

import contextlib
import os
import zlib
from collections.abc import Iterator

_VARIABLE = "TRITON_DISABLE_LINE_INFO"  # Triton reads it itself; if it is set, it decides
# jaxlib's TritonAnyKernelCall.kernel_call.kernel.ttir, as numbers of fields in protocol buffers.
_TRITON_IR = (1, 1, 5)
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # how the value of a field is encoded


def line_numbers() -> str:
    """The value of Triton's variable, by default "1": no line numbers."""
    return os.environ.get(_VARIABLE, "1")


@contextlib.contextmanager
def without_line_numbers() -> Iterator[None]:
    """What Triton compiles in this context has no line numbers, unless its variable decides."""
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
    """A message in protocol buffers without one field, given by the numbers that lead to it."""
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
