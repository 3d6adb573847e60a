"""The share of the device's peak FLOP/s that a run reaches.

    MFU = tokens/s * (FP8 work / FP8 peak + other work / 16-bit peak) / devices

so that 100 % means the same for every precision: as fast as the device can multiply. The work for a
token is the model config's `work_per_token`.
"""

from coat_jax.models.protocol import Work

# Floating-point operations a second by what a device's name contains, the more specific names
# first: in 16 bits and in FP8, dense, summed in FP32. From NVIDIA's data sheets.
PEAKS = {
    "H100 PCIe": (756e12, 1513e12),
    "H100 NVL": (835e12, 1671e12),
    "H100": (989e12, 1979e12),
    "H200 NVL": (835e12, 1671e12),
    "H200": (989e12, 1979e12),  # and GH200, whose name contains it
    "B200": (2250e12, 4500e12),
    "L40S": (362e12, 733e12),
    "L40": (181e12, 362e12),
    "L4": (121e12, 242e12),
    "RTX 4090": (165e12, 330e12),
    "A100": (312e12, 312e12),  # without FP8
}


def utilization(
    work: Work | None, device_kind: str, tokens_per_second: float, devices: int
) -> float | None:
    """Returns the MFU of a run; None if the work or the device's peak is not known, as for CPUs."""
    peak = next((peak for name, peak in PEAKS.items() if name in device_kind), None)
    if work is None or peak is None:
        return None
    wide, fp8 = peak
    return tokens_per_second * (work.fp8 / fp8 + work.wide / wide) / devices
