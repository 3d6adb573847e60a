"""The numbers of README that stand on no other page in this form."""

from experiments.published.loss import layer_units
from experiments.published.results import GB, bold, case, of
from experiments.published.stability import measured
from experiments.stability.show import compared


def speed_up() -> str:
    """How many times as fast COAT trains Llama-2-7B as BF16 does, at the same batch size."""
    return f"{_training('COAT')['tokens_per_second'] / _training('BF16')['tokens_per_second']:.2f}"


def less_memory() -> str:
    """In how many times less memory."""
    return f"{_training('BF16')['peak'] / _training('COAT')['peak']:.2f}"


def training() -> list[list[str]]:
    """Speed and memory by precision and batch size, of the cases that keep all on the GPU."""
    rows = [["precision", "batch", "tokens/s", "peak memory, GB"]]
    for one in of("training_throughput")["cases"]:
        if not one["offloaded"] and not one["released"]:
            name = bold(one["precision"], one["precision"] == "COAT")
            speed, peak = f"{one['tokens_per_second']:,.0f}", f"{one['peak'] / GB:.1f}"
            rows.append([name, str(one["batch"]), speed, peak])
    return rows


def saved(preset: str) -> str:
    """What a layer saves for its backward pass, in units of its input."""
    return f"{layer_units(preset):.1f}"


def longer_in_int8() -> str:
    """By how many percent a layer takes longer in COAT_INT8 than in COAT."""
    ours, in_int8 = (
        case("layer_speed", layer=f"coat_jax {name}")["ms"] for name in ("COAT", "COAT_INT8")
    )
    return f"{100 * (in_int8 / ours - 1):.0f}"


def failed_more() -> str:
    """By how many percentage points more runs fail in COAT than in BF16, over learning rates."""
    found = compared(measured(), "coat")
    assert found is not None
    assert found.low < 0 < found.high, "README says that this is not significant."
    return f"{100 * found.difference:.1f}"


def _training(precision: str) -> dict[str, float]:
    return case(
        "training_throughput", precision=precision, batch=10, offloaded=False, released=False
    )
