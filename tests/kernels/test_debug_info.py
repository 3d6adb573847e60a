"""Messages without the field of debugging information."""

import zlib

import pytest

from coat_jax.kernels.debug_info import without_triton_ir


def field(number, value):
    """A field of a message in protocol buffers: an integer, four or eight bytes, or a string."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, tuple):
        (fixed,) = value
        return varint(number << 3 | {8: 1, 4: 5}[len(fixed)]) + fixed
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(number):
    """Seven bits to a byte, the lowest first; all bytes but the last have their top bit set."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def launch(kernel, parameters=b""):
    """A launch of a kernel, as jax-triton describes it."""
    call = field(1, kernel) + field(2, 4096) + parameters + field(9, (b"12345678",))
    return zlib.compress(field(1, call) + field(2, b"name"))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 20_000, 300_000])
@pytest.mark.parametrize("after", [b"", field(6, 90) + field(10, 1) + field(12, (b"1234",))])
def test_triton_ir_is_left_out_and_all_else_stays(size, after):
    before = field(1, b"step_leaf") + field(2, 2) + field(4, b"x" * 20_000)
    shorter = zlib.decompress(without_triton_ir(launch(before + field(5, b"m" * size) + after)))
    assert shorter == zlib.decompress(launch(before + after))


def test_only_the_field_of_the_kernel_is_left_out():
    """A field five elsewhere, as of a launch's parameters, is another thing."""
    parameters = field(5, field(1, 16)) + field(5, field(5, b"value"))
    whole = launch(field(4, field(5, b"not a message")), parameters)
    assert zlib.decompress(without_triton_ir(whole)) == zlib.decompress(whole)
