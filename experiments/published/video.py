"""Attention between tiles: docs/video.md."""

from experiments.published.results import bold, of
from experiments.tile_attention_speed import CUDNN, KINDS

NEAR = 0.2  # the share of tiles that the table has, or the nearest


def speed() -> list[list[str]]:
    """How long attention between a fifth of the tiles takes, and dense attention, by grid."""
    cases = of("tile_attention_speed")["cases"]
    grids = list(dict.fromkeys(case["grid"] for case in cases))
    rows = [["ms", "tiles", *(f"{grid}, {kind}" for grid in grids for kind in KINDS.values())]]
    for way in dict.fromkeys(case["way"] for case in cases):
        shown = [
            min(of_grid, key=lambda case: abs(case["density"] - NEAR))
            for grid in grids
            if (of_grid := [c for c in cases if c["way"] == way and c["grid"] == grid])
        ]
        times = (f"{case[kind]:.1f}" for case in shown for kind in KINDS)
        cells = (bold(cell, way == "ours, FP8") for cell in times)
        rows.append([way, f"{100 * shown[0]['density']:.0f} %", *cells])
    assert CUDNN in {row[0] for row in rows}
    return rows
