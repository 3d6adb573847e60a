"""What a layer takes: layer_speed, gpu_suite, activation_memory and granularity."""

from typing import Any

from experiments.figures.measured.files import case, of

OURS, LARGER_BLOCKS = "1 x 16, 2^n (ours)", "1 x 64"
TENSORWISE = "torchao float8 tensorwise, compiled"


def layer(name: str) -> dict[str, Any]:
    """A case of layer_speed."""
    return case("layer_speed", layer=name)


def longer_in_int8() -> tuple[float]:
    """By how many percent a layer takes longer in COAT_INT8 than in COAT."""
    return (100 * (layer("coat_jax COAT_INT8")["ms"] / layer("coat_jax COAT")["ms"] - 1),)


def longer_in_suite() -> tuple[float]:
    """The same for the four layers of gpu_suite."""
    ms = of("gpu_suite")["stacks"]["ms"]
    return (100 * (ms["COAT_INT8"] / ms["COAT"] - 1),)


def range_in_int8() -> tuple[float, float]:
    """The smaller and the larger of these two."""
    both = (*longer_in_suite(), *longer_in_int8())
    return min(both), max(both)


def unit(name: str, kind: str = "units") -> float:
    """What a whole layer saves, in U."""
    return of("activation_memory")[kind][name]["the layer"]


def exact_scale_gains(tensor: str, blocks: str = "1 x 16") -> float:
    """By how many percent exact scales of blocks lower an error of granularity."""
    recorded = of("granularity")["recorded"]
    exact, ours = (recorded[way]["errors"][tensor] for way in (blocks, OURS))
    return 100 * (1 - exact / ours)


def exact_scales_in_our_bytes() -> tuple[float, float, float]:
    """Bytes a value of blocks of 64 with exact scales; how much lower errors of x and a are.

    Raises unless our blocks take the same bytes.
    """
    recorded = of("granularity")["recorded"]
    size, ours = (recorded[way]["bytes"] for way in (LARGER_BLOCKS, OURS))
    if size != ours:
        raise ValueError(f"{LARGER_BLOCKS} takes {size} bytes and not {ours}. See benchmarks.md.")
    return size, *(exact_scale_gains(tensor, LARGER_BLOCKS) for tensor in ("x", "a"))
