"""Video transformers: docs/video.md."""

from experiments.published.results import of


def demo() -> list[list[str]]:
    """The held-out losses of the demo, by time."""
    found = of("video_demo")
    bf16, fp8 = found["losses"].values()
    rows = [["time, where 1 is noise", "BF16, all tiles", "FP8, half of the tiles above 0.5"]]
    for time, *losses in zip(found["times"], bf16, fp8, strict=True):
        rows.append([f"{time}", *(f"{loss:.4f}" for loss in losses)])
    return rows
