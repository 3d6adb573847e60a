"""XLA's options for the programs of a run: which runs leave out XLA's own Triton products."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from train_cases import SMALL

from coat_jax.optax.states.host_memory import COPIES_AT_ONCE
from coat_jax.training.compiler_options import NO_TRITON_GEMM, compiler_options


def options(precision, platform="gpu", offload=False):
    """Those of a run on one device, of which only the platform matters."""
    devices = np.array([SimpleNamespace(platform=platform)])
    model = dataclasses.replace(SMALL.model, precision=precision)
    optimizer = dataclasses.replace(SMALL.optimizer, offload=offload)
    config = dataclasses.replace(SMALL, model=model, optimizer=optimizer)
    return compiler_options(config, SimpleNamespace(devices=devices, size=1))


@pytest.fixture(autouse=True)
def without_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.parametrize("precision", ["fp8_linear", "coat", "coat_int8"])
def test_products_beside_those_in_fp8_are_cublass_on_gpus(precision):
    assert options(precision) == NO_TRITON_GEMM
    assert options(precision, platform="cpu") == {}


def test_bf16_leaves_the_choice_to_xla():
    assert options("bf16") == {}


def test_all_copies_of_an_offloaded_state_may_run_at_once():
    assert options("bf16", offload=True) == COPIES_AT_ONCE


def test_an_option_in_xla_flags_is_left_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--other=1 --xla_gpu_enable_triton_gemm=true")
    assert options("coat") == {}
