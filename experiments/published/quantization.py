"""Size, speed and loss of quantized models: quantized_generation, int4_speed and int4_study."""

from typing import Any

from experiments.int4_study import increases
from experiments.int4_study.study import STUDY
from experiments.published.results import FOLDER, GB, case, of
from experiments.row_files import Row

CASES = {
    ("bf16", "none"): "BF16",
    ("bf16", "int8"): "BF16, cache in INT8",
    ("fp8", "int8"): "FP8, cache in INT8",
    ("int8", "int8"): "INT8, cache in INT8",
    ("int4", "int8"): "INT4 and FP8, cache in INT8",
}
COLUMNS = ["prompts, 1 text", "16 texts", "generating, 1 text", "16 texts", "64 texts"]


def table() -> list[list[str]]:
    """What Llama-2-7B takes in each format, and how many times as fast as in BF16 it generates."""
    rows = [["", "parameters, GB", *COLUMNS]]
    bf16 = _rates("bf16", "none")
    for (name, cache), words in CASES.items():
        size = _case(name, cache)["parameters"] / GB
        times = zip(_rates(name, cache), bf16, strict=True)
        rows.append([words, f"{size:.1f}", *(f"{ours / one:.2f}" for ours, one in times)])
    return rows


def cache_of_a_text(cache: str) -> str:
    """GB that the keys and values of a text of Llama-2-7B take while it is generated."""
    return f"{_case('bf16', cache)['batches'][0]['cache'] / GB:.2f}"


def faster(rival: str, rows: str) -> str:
    """How many times as fast as a rival INT4's kernel multiplies so many rows, at the least."""
    us = {
        (each["of"], each["way"]): each["us"]
        for each in of("int4_speed")["cases"]
        if each["of"].endswith(f", {rows} rows")
    }
    least = min(us[one, _spaced(rival)] / us[one, "W4A8 kernel"] for one, _ in us)
    return f"{least:.1f}"


def increase(way: str) -> str:
    """By how many nats a token quantization increases the loss of networks of 40M."""
    return f"{increases.mean_increase(_runs('bf16'), _spaced(way)).mean:.3f}"


def of_fireq(way: str, part: str) -> str:
    """The share of FireQ's increase that a way has: its "mean", or an end of its interval."""
    share = increases.ratio(_runs("bf16"), _spaced(way), "FireQ W4A8")
    return f"{getattr(share, part):.2f}"


def excess(way: str, part: str) -> str:
    """How much more the loss of networks trained in COAT rises: "mean", or "half" its interval."""
    found = increases.excesses(_runs("bf16", "coat"))["coat", _spaced(way)]
    return f"{getattr(found, part):.4f}"


def _runs(*arms: str) -> list[Row]:
    rows = STUDY.read([FOLDER / "int4_study.json"])
    return [row for row in rows if row["size"] == "40M" and row["arm"] in arms]


def _spaced(way: str) -> str:
    return way.replace("_", " ")


def _rates(name: str, cache: str) -> list[float]:
    """Tokens a second, by column of the table."""
    batches = _case(name, cache)["batches"]
    prompts, generated = (
        [batch[f"{part}_tokens_per_second"] for batch in batches] for part in ("prefill", "decode")
    )
    return [*prompts[:2], *generated]


def _case(name: str, cache: str) -> dict[str, Any]:
    return case("quantized_generation", case=name, cache=cache)
