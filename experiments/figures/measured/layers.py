"""What a layer takes: layer_speed, gpu_suite, activation_memory and granularity."""

from typing import Any

from experiments.figures.measured.files import case, of

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


def exact_scale_gains(tensor: str) -> float:
    """By how many percent an exact scale lowers an error of granularity."""
    recorded = of("granularity")["recorded"]
    exact, ours = (recorded[way]["errors"][tensor] for way in ("1 x 16", "1 x 16, 2^n (ours)"))
    return 100 * (1 - exact / ours)
