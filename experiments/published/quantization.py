"""Size and speed of models in 8 bits: quantized_generation.json."""

from typing import Any

from experiments.published.results import GB, case

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


def small(extreme: str) -> str:
    """How many times as fast as in BF16 llama_124m reads one prompt, "min" or "max"."""
    times = sorted(_times_as_fast("llama_124m", name)[0] for name in QUANTIZED if name != "bf16")
    return f"{times[0 if extreme == 'min' else -1]:.2f}"


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
