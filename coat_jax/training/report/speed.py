"""The arithmetic per token, and the share of the device's peak FLOP/s that a run reaches.

    linear layers    2 per weight                            in FP8 where the precision says so
    attention        4 heads head_dim tokens seen            in 16 bits
    head             2 width vocabulary                      in 16 bits

forward, and twice that backward; recomputation does not count. Then

    MFU = tokens/s * (FP8 work / FP8 peak + other work / 16-bit peak) / devices

so that 100 % means the same for every precision: as fast as the device can multiply.
"""

from typing import NamedTuple

from coat_jax import models
from coat_jax.precision import precision_of


class Work(NamedTuple):
    """Floating-point operations for a token, forward and backward."""

    fp8: float
    wide: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.fp8 + self.wide


class PeakFlops(NamedTuple):
    """Floating-point operations a second, dense, summed in FP32; fp8 equals wide without FP8."""

    wide: float
    fp8: float


# By what a device's name contains, the more specific names first. From NVIDIA's data sheets.
PEAKS = {
    "H100 PCIe": PeakFlops(756e12, 1513e12),
    "H100 NVL": PeakFlops(835e12, 1671e12),
    "H100": PeakFlops(989e12, 1979e12),
    "H200 NVL": PeakFlops(835e12, 1671e12),
    "H200": PeakFlops(989e12, 1979e12),  # and GH200, whose name contains it
    "B200": PeakFlops(2250e12, 4500e12),
    "L40S": PeakFlops(362e12, 733e12),
    "L40": PeakFlops(181e12, 362e12),
    "L4": PeakFlops(121e12, 242e12),
    "RTX 4090": PeakFlops(165e12, 330e12),
    "A100": PeakFlops(312e12, 312e12),
}


def work_per_token(config: models.Config, sequence: int) -> Work:
    """The average work for a token of a sequence of this length."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    weights = config.width * (2 * queries + 2 * keys + 3 * config.ffn)
    seen = min(config.window or sequence, sequence)
    mean_seen = (seen * (seen + 1) / 2 + (sequence - seen) * seen) / sequence
    linear = 2 * config.layers * weights
    attention = 4 * config.layers * queries * mean_seen
    head = 2 * config.width * config.vocab
    if precision_of(config.precision).fp8_linear:
        return Work(fp8=3 * linear, wide=3 * (attention + head))
    return Work(fp8=0.0, wide=3 * (linear + attention + head))


def peak_flops_of(device_kind: str) -> PeakFlops | None:
    """The peak FLOP/s of a device by its name; None where it is not known, as for CPUs."""
    return next((peak for name, peak in PEAKS.items() if name in device_kind), None)


def utilization(work: Work, peak: PeakFlops, tokens_per_second: float, devices: int) -> float:
    """The share of the peak FLOP/s that is reached: MFU."""
    ideal_seconds = work.fp8 / peak.fp8 + work.wide / peak.wide
    return tokens_per_second * ideal_seconds / devices
