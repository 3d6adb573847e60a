"""Size, speed and loss of quantized models: quantized_generation.json and int4_study.json."""

from typing import Any

from experiments.int4_study import increases
from experiments.int4_study.study import STUDY
from experiments.published.results import FOLDER, GB, case
from experiments.row_files import Row

QUANTIZED = {
    "bf16": "BF16",
    "int8": "INT8",
    "int8:static": "INT8, static activations",
    "int8:none": "INT8, weights alone",
    "fp8": "FP8",
    "fp8:static": "FP8, static activations",
    "fp8:none": "FP8, weights alone",
}
COLUMNS = [
    f"{part}, {many}" for part in ("prompts", "generating") for many in ("1 text", "16 texts")
]


def table() -> list[list[str]]:
    """What Llama-2-7B takes in 8 bits, and how many times as fast as in BF16 it generates."""
    rows = [["", "parameters, GB", *COLUMNS]]
    for name, words in QUANTIZED.items():
        size = _case("llama2_7b", name)["parameters"] / GB
        faster = _times_as_fast("llama2_7b", name)
        rows.append([words, f"{size:.1f}", *(f"{times:.2f}" for times in faster)])
    return rows


def cache_of_a_text() -> str:
    """GB that the keys and values of a text of Llama-2-7B take while it is generated."""
    return f"{_case('llama2_7b', 'bf16')['batches'][0]['cache'] / GB:.2f}"


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


def _times_as_fast(model: str, name: str) -> list[float]:
    """By column of the table."""
    both = zip(_rates(model, name), _rates(model, "bf16"), strict=True)
    return [ours / bf16 for ours, bf16 in both]


def _rates(model: str, name: str) -> list[float]:
    """Tokens a second."""
    batches = _case(model, name)["batches"]
    return [
        batch[f"{part}_tokens_per_second"] for part in ("prefill", "decode") for batch in batches
    ]


def _case(model: str, name: str) -> dict[str, Any]:
    return case("quantized_generation", model=model, case=name)
