"""Videos, and attention between tiles: docs/video.md."""

from experiments.published.results import bold, of
from experiments.tile_attention_speed import KINDS

NEAR = 0.21  # the share of tiles that the table has, or the nearest


def speed() -> list[list[str]]:
    """How long attention between a fifth of the tiles takes, and dense attention, by grid."""
    cases = of("tile_attention_speed")["cases"]
    grids = list(dict.fromkeys(case["grid"] for case in cases))
    by_distance = sorted(cases, key=lambda case: -abs(case["density"] - NEAR))
    nearest = {(case["way"], case["grid"]): case for case in by_distance}  # the last of each
    rows = [["ms", "tiles", *(f"{grid}, {kind}" for grid in grids for kind in KINDS.values())]]
    for way in dict.fromkeys(case["way"] for case in cases):
        shown = [nearest.get((way, grid), {}) for grid in grids]
        times = (f"{case[kind]:.1f}" if case else "" for case in shown for kind in KINDS)
        share = next(case["density"] for case in shown if case)
        cells = (bold(cell, way == "ours, FP8") for cell in times)
        rows.append([way, f"{100 * share:.0f} %", *cells])
    return rows


def demo() -> list[list[str]]:
    """The held-out losses of the demo's two models, by time."""
    found = of("video_demo")
    bf16, fp8 = found["losses"]["BF16"], found["losses"]["FP8"]
    rows = [["time", *(f"{time}" for time in found["times"])]]
    rows += [[name, *(f"{loss:.3f}" for loss in found["losses"][name])] for name in ("BF16", "FP8")]
    above = (f"{100 * (ours / theirs - 1):+.0f} %" for ours, theirs in zip(fp8, bf16, strict=True))
    return [*rows, ["difference", *above]]
