"""Mixtures of experts: docs/experts.md."""

from experiments.published.results import GB, bold, of

WAYS = {
    "ours, FP8": "`COAT`",
    "ours, forward in BF16": "`COAT_BF16_FORWARD`",
    "ours, BF16": "`BF16`",
    "torch._grouped_mm, BF16": "torch, BF16",
    "tokamax, BF16": "tokamax, BF16",
}


def gigabytes(precision: str) -> str:
    """What a step of OLMoE takes of one GPU."""
    return f"{of('experts_memory')[precision]['peak'] / GB:.0f}"


def speed() -> list[list[str]]:
    """How long the experts of a layer of OLMoE take, in milliseconds."""
    routes = "balanced", "skewed"
    rows = [["ms", *(f"{route}{more}" for route in routes for more in ("", ", with backward"))]]
    cases = {(case["route"], case["way"]): case for case in of("grouped_speed")["cases"]}
    for way, name in WAYS.items():
        times = (cases[route, way][what] for route in routes for what in ("forward", "both"))
        rows.append([name, *(bold(f"{ms:.1f}", way == "ours, FP8") for ms in times)])
    return rows
