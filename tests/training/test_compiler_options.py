"""XLA's options for the programs of a run: which runs leave out XLA's own Triton products."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from train_cases import SMALL

from coat_jax.training.compiler_options import TRITON_GEMM, compiler_options


def options(precision, platform="gpu"):
    """Those of a run on one device, of which only the platform matters."""
    devices = np.array([SimpleNamespace(platform=platform)])
    config = dataclasses.replace(SMALL, model=dataclasses.replace(SMALL.model, precision=precision))
    return compiler_options(config, SimpleNamespace(devices=devices, size=1))


@pytest.fixture(autouse=True)
def without_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.parametrize("precision", ["fp8_linear", "coat", "coat_int8"])
def test_products_beside_those_in_fp8_are_cublass_on_gpus(precision):
    assert options(precision) == {TRITON_GEMM: False}
    assert options(precision, platform="cpu") == {}


def test_bf16_leaves_the_choice_to_xla():
    assert options("bf16") == {}


def test_an_option_in_xla_flags_is_left_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--other=1 --{TRITON_GEMM}=true")
    assert options("coat") == {}
