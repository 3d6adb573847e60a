"""Work is counted, not guessed; and 100 % of the peak means the same for every precision."""

import dataclasses

import pytest

from coat_jax import models
from coat_jax.training.report.speed import (
    PEAKS,
    PeakFlops,
    Work,
    peak_flops_of,
    utilization,
    work_per_token,
)

LLAMA = models.config_of("llama2_7b")


def test_work_is_six_per_weight_and_token_and_attention():
    """PaLM's count (Chowdhery et al. 2022, appendix B), with half of attention: it is causal."""
    weights = models.parameters_count(LLAMA) - LLAMA.vocab * LLAMA.width - 65 * LLAMA.width
    work = work_per_token(LLAMA, 2048)
    attention = 6 * LLAMA.layers * LLAMA.width * (2048 + 1)
    assert work.total == pytest.approx(6 * weights + attention)


def test_only_linear_layers_are_in_fp8():
    coat, bf16 = (
        work_per_token(dataclasses.replace(LLAMA, precision=p), 2048) for p in ("coat", "bf16")
    )
    assert coat.total == bf16.total == bf16.wide
    assert coat.wide == pytest.approx(
        6 * LLAMA.vocab * LLAMA.width + 6 * LLAMA.layers * LLAMA.width * 2049
    )


def test_a_window_and_grouped_queries_lower_the_work():
    whole = work_per_token(LLAMA, 4096)
    window = work_per_token(dataclasses.replace(LLAMA, window=1024), 4096)
    # Tokens see 1 .. 1024 others, then 1024 each.
    mean = (1024 * 1025 / 2 + 3072 * 1024) / 4096
    assert whole.wide - window.wide == pytest.approx(12 * 32 * 4096 * (4097 / 2 - mean))
    assert work_per_token(dataclasses.replace(LLAMA, window=1024), 512) == work_per_token(
        LLAMA, 512
    )
    grouped = work_per_token(dataclasses.replace(LLAMA, kv_heads=8), 4096)
    assert whole.fp8 - grouped.fp8 == pytest.approx(6 * 32 * 4096 * 2 * (32 - 8) * 128)


def test_utilization_is_ideal_time_over_time():
    work, peak = Work(fp8=8e9, wide=2e9), PeakFlops(wide=1e12, fp8=2e12)
    ideal = 8e9 / 2e12 + 2e9 / 1e12
    assert utilization(work, peak, tokens_per_second=1 / ideal, devices=1) == pytest.approx(1.0)
    assert utilization(work, peak, tokens_per_second=1 / ideal, devices=4) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("cpu", None),
    ],
)
def test_a_device_is_known_by_its_name(kind, name):
    assert peak_flops_of(kind) is PEAKS.get(name)
