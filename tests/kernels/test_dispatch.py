"""Which implementation runs on which GPU."""

import importlib.metadata
import tomllib
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.kernels import dispatch


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that a GPU of some compute capability is there, and all packages."""

    def pretend(capability):
        monkeypatch.setattr(dispatch, "gpu_capability", lambda: capability)
        monkeypatch.setattr(dispatch, "triton_installed", lambda: True)
        monkeypatch.setattr(dispatch, "unsupported_triton", lambda: None)

    dispatch._warned_of_triton.cache_clear()
    yield pretend
    dispatch._warned_of_triton.cache_clear()


@pytest.mark.parametrize("capability", [89, 90, 100, 120])  # Ada, Hopper, Blackwell
def test_a_gpu_that_multiplies_fp8_runs_the_kernels(gpu, capability):
    gpu(capability)
    assert dispatch.choose(None) == dispatch.choose("triton") == "triton"
    assert dispatch.choose_fp8(None) == "triton"
    assert dispatch.multiplies_fp8()


@pytest.mark.parametrize("capability", [70, 75, 80, 86, 87])  # Volta, Turing, Ampere
def test_a_gpu_before_ada_computes_through_xla_and_refuses_fp8(gpu, capability):
    gpu(capability)
    assert dispatch.choose(None) == "xla"
    assert not dispatch.multiplies_fp8()
    named = f"compute capability {capability / 10:.1f}"
    with pytest.raises(RuntimeError, match=named):
        dispatch.choose("triton")
    with pytest.raises(UserError, match=named):
        dispatch.choose_fp8(None)
    assert dispatch.choose_fp8("xla") == "xla"


@pytest.mark.parametrize(
    ("reported", "capability", "words"),
    [("9.0", 90, "compute capability 9.0"), ("gfx942", 0, "no compute capability")],
)
def test_what_a_gpu_reports_is_understood(monkeypatch, reported, capability, words):
    device = types.SimpleNamespace(compute_capability=reported)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert dispatch.gpu_capability.__wrapped__() == capability
    assert dispatch.described(capability) == words


def test_a_gpu_of_another_maker_refuses_fp8(gpu):
    gpu(0)
    assert dispatch.choose(None) == "xla"
    with pytest.raises(UserError, match=r"no compute capability; products in FP8 need 8\.9"):
        dispatch.choose_fp8(None)


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("3.5.1", False),
        ("3.6.0", True),
        ("3.7.1+git12ab", True),
        ("3.7rc1", True),
        ("nightly", False),
        ("3.8.0", False),
        ("4.0", False),
    ],
)
def test_kernels_need_a_triton_with_which_they_compile(monkeypatch, version, supported):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    wrong = dispatch.unsupported_triton()
    if supported:
        assert wrong is None
    else:
        assert wrong.startswith(f"Triton {version} is installed")
        assert wrong.endswith("at least 3.6 and below 3.8")


def test_a_triton_under_another_name_may_compile_them(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert dispatch.unsupported_triton() is None


def test_the_extra_installs_a_triton_with_which_the_kernels_compile():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    first, below = (".".join(map(str, v)) for v in (dispatch.TRITON_FROM, dispatch.TRITON_BELOW))
    assert f"triton>={first},<{below}" in project["project"]["optional-dependencies"]["gpu"]


def test_xla_replaces_a_triton_that_cannot_compile_the_kernels_and_says_so_once(gpu, monkeypatch):
    gpu(90)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "unsupported_triton", lambda: "Triton 3.9.0 is installed")
    with pytest.warns(UserWarning, match=r"Triton 3\.9\.0 is installed\. pip install"):
        assert dispatch.choose(None) == "xla"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.choose(None) == "xla"
    with pytest.raises(ImportError, match=r"3\.9\.0 is installed\. pip install 'triton>=3\.6"):
        dispatch.choose("triton")


def test_without_a_gpu_everything_runs_through_xla(gpu):
    gpu(None)
    assert dispatch.choose(None) == dispatch.choose_fp8(None) == "xla"
    assert dispatch.target_capability() == 90  # programs are compiled for Hopper ahead of time


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["linear", "adamw"])
def test_a_kernel_that_is_compiled_for_a_cpu_says_so(name):
    pytest.importorskip("jax_triton")
    params = {"w": jnp.ones((128, 128))}

    def adamw(params):
        tx = coat.optax.fp8_adamw(1e-3, implementation="triton")
        return tx.update(params, tx.init(params), params)

    def linear(params):
        return coat.ops.linear(params["w"], params["w"], implementation="triton")

    call = linear if name == "linear" else adamw
    for run in (call, jax.jit(call)):
        with pytest.raises(UserError, match=r"compiled for cpu\. Leave implementation out"):
            run(params)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="not 'cuda'"):
        dispatch.choose("cuda")
