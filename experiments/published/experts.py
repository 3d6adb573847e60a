"""Mixtures of experts: docs/experts.md."""

import statistics
from typing import Any

from experiments.published import loss
from experiments.published.results import GB, bold, case, of

LAYERS = {"olmoe": "OLMoE", "qwen3": "Qwen3"}
ROUTES = "balanced", "skewed"
WAYS = {
    "ours, FP8": "`COAT`",
    "ours, forward in BF16": "`COAT_BF16_FORWARD`",
    "ours, BF16": "`BF16`",
    "torch._grouped_mm, BF16, compiled": "torch, BF16",
    "tokamax, BF16": "tokamax, BF16",
}


def gigabytes(precision: str) -> str:
    """What training OLMoE takes of one GPU."""
    return f"{_trained(precision)['peak'] / GB:.0f}"


def tokens(precision: str) -> str:
    """Tokens a second of OLMoE on one GPU."""
    return f"{_trained(precision)['tokens_per_second']:,.0f}"


def speed() -> list[list[str]]:
    """How long the experts of a layer take, in milliseconds: forward / with the backward pass."""
    rows = [["ms", *(f"{name}, {route}" for name in LAYERS.values() for route in ROUTES)]]
    cases = {
        (each["layer"], each["route"], each["way"]): each for each in of("grouped_speed")["cases"]
    }
    for way, name in WAYS.items():
        found = [cases[layer, route, way] for layer in LAYERS for route in ROUTES]
        times = (f"{each['forward']:.1f} / {each['both']:.1f}" for each in found)
        rows.append([name, *(bold(time, way == "ours, FP8") for time in times)])
    return rows


def cost() -> list[list[str]]:
    """What presets cost a small model of experts, and what they change in its choices."""
    rows = [["", "training loss, %", "other choices than in BF16", "load of the busiest expert"]]
    arms = {"BF16": "bf16", "COAT": "coat", "COAT_BF16_FORWARD": "coat_bf16_forward"}
    for name, arm in arms.items():
        found = [row["held_out"] for row in loss.runs("experts") if row["arm"] == arm]
        changed, load = (
            statistics.mean(share for batches in found for share in batches[measure])
            for measure in ("changed_choices", "largest_load")
        )
        percent = "" if name == "BF16" else loss.cell("experts", arm)
        rows.append([f"`{name}`", percent, f"{100 * changed:.1f} %", f"{load:.2f}"])
    return rows


def _trained(precision: str) -> dict[str, Any]:
    return case("training_throughput_olmoe_7b", precision=precision, batch=8)
