"""XLA's options for the programs of a run: which runs leave out XLA's own Triton products."""

from types import SimpleNamespace

import numpy as np
import pytest
from train_cases import small

from coat_jax.optax.states.host_memory import COPIES_AT_ONCE
from coat_jax.training.compiler_options import NO_TRITON_GEMM, compiler_options


@pytest.mark.parametrize(
    ("precision", "platform", "offload", "flags", "options"),
    [
        ("coat", "gpu", False, "", NO_TRITON_GEMM),
        ("fp8_linear", "gpu", False, "", NO_TRITON_GEMM),
        ("coat_int8", "gpu", False, "", NO_TRITON_GEMM),
        ("coat", "cpu", False, "", {}),
        ("bf16", "gpu", False, "", {}),
        ("bf16", "gpu", True, "", COPIES_AT_ONCE),
        ("coat", "gpu", False, "--other=1 --xla_gpu_enable_triton_gemm=true", {}),
    ],
)
def test_products_beside_those_in_fp8_are_cublass_on_gpus(
    precision, platform, offload, flags, options, monkeypatch
):
    """All copies of an offloaded state may run at once; an option in XLA_FLAGS is left alone."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    config = small(model={"precision": precision}, optimizer={"offload": offload})
    devices = np.array([SimpleNamespace(platform=platform)])
    assert compiler_options(config, SimpleNamespace(devices=devices, size=1)) == options
