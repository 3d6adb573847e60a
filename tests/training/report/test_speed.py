"""Work is counted, not guessed; and 100 % of the peak means the same for every precision."""

import dataclasses

import pytest

from coat_jax import models
from coat_jax.models.protocol import Work
from coat_jax.training.report.recorder import PEAKS, utilization

LLAMA = models.config_of("llama2_7b")


def test_work_is_six_per_weight_and_token_and_attention():
    """PaLM's count (Chowdhery et al. 2022, appendix B), with half of attention: it is causal."""
    weights = models.parameters_count(LLAMA) - LLAMA.vocab * LLAMA.width - 65 * LLAMA.width
    work = LLAMA.work_per_token(2048)
    attention = 6 * LLAMA.layers * LLAMA.width * (2048 + 1)
    assert sum(work) == pytest.approx(6 * weights + attention)


def test_only_linear_layers_are_in_fp8():
    coat, bf16 = (
        dataclasses.replace(LLAMA, precision=p).work_per_token(2048) for p in ("coat", "bf16")
    )
    assert sum(coat) == sum(bf16) == bf16.wide
    assert coat.wide == pytest.approx(
        6 * LLAMA.vocab * LLAMA.width + 6 * LLAMA.layers * LLAMA.width * 2049
    )


def test_a_window_and_grouped_queries_lower_the_work():
    whole = LLAMA.work_per_token(4096)
    window = dataclasses.replace(LLAMA, window=1024).work_per_token(4096)
    mean = (1024 * 1025 / 2 + 3072 * 1024) / 4096  # tokens see 1 .. 1024 others, then 1024 each
    assert whole.wide - window.wide == pytest.approx(12 * 32 * 4096 * (4097 / 2 - mean))
    grouped = dataclasses.replace(LLAMA, kv_heads=8).work_per_token(4096)
    assert whole.fp8 - grouped.fp8 == pytest.approx(6 * 32 * 4096 * 2 * (32 - 8) * 128)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
    ],
)
def test_utilization_is_ideal_time_over_time(kind, name):
    wide, fp8 = PEAKS[name]
    ideal = 8e9 / fp8 + 2e9 / wide
    for devices in (1, 4):
        found = utilization(Work(fp8=8e9, wide=2e9), kind, 1 / ideal, devices)
        assert found == pytest.approx(1 / devices)


def test_what_is_not_known_has_no_utilization():
    assert utilization(Work(1.0, 1.0), "cpu", 1.0, 1) is None
    assert utilization(None, "NVIDIA L4", 1.0, 1) is None
