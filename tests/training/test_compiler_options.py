"""XLA's options for the programs of a run: which runs have the one for INT8 products."""

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


def test_int8_products_are_those_of_cublas_on_gpus():
    assert options("coat_int8") == {TRITON_GEMM: False}
    assert options("coat_int8", platform="cpu") == {}


@pytest.mark.parametrize("precision", ["bf16", "coat"])
def test_other_precisions_leave_the_choice_to_xla(precision):
    assert options(precision) == {}


def test_an_option_in_xla_flags_is_left_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--other=1 --{TRITON_GEMM}=true")
    assert options("coat_int8") == {}
