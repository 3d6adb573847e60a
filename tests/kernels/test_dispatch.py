"""Which implementation runs on which GPU."""

import types

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

    return pretend


@pytest.mark.parametrize("capability", [89, 120])  # Ada, Blackwell
def test_a_gpu_that_multiplies_fp8_runs_the_kernels(gpu, capability):
    gpu(capability)
    assert dispatch.choose(None) == dispatch.choose("triton") == "triton"
    assert dispatch.choose(None, products=True) == "triton"


@pytest.mark.parametrize("capability", [70, 88])
def test_a_gpu_before_ada_computes_through_xla_and_refuses_fp8(gpu, capability):
    gpu(capability)
    assert dispatch.choose(None) == "xla"
    named = f"compute capability {capability / 10:.1f}"
    with pytest.raises(UserError, match=named):
        dispatch.choose("triton")
    with pytest.raises(UserError, match=named):
        dispatch.choose(None, products=True)
    assert dispatch.choose("xla", products=True) == "xla"


def test_a_gpu_without_fast_int8_refuses_int8_alone(gpu):
    arrays = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((32, 16), jnp.bfloat16)
    gpu(103)
    with pytest.raises(UserError, match=r"compute capability 10\.3: its products in INT8 take 30"):
        coat.ops.linear(*arrays, precision=coat.COAT_INT8, implementation="xla")
    coat.ops.linear(*arrays, precision=coat.COAT, implementation="xla")
    gpu(100)
    coat.ops.linear(*arrays, precision=coat.COAT_INT8, implementation="xla")


@pytest.mark.parametrize(
    ("reported", "capability", "words"),
    [("9.0", 90, "compute capability 9.0"), ("gfx942", 0, "no compute capability")],
)
def test_what_a_gpu_reports_is_understood(monkeypatch, reported, capability, words):
    device = types.SimpleNamespace(compute_capability=reported)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert dispatch.gpu_capability.__wrapped__() == capability
    assert dispatch.describe_capability(capability) == words


def test_a_gpu_of_another_maker_and_no_gpu_compute_through_xla(gpu):
    gpu(0)
    assert dispatch.choose(None) == "xla"
    with pytest.raises(UserError, match=r"no compute capability; .*products in FP8 need 8\.9"):
        dispatch.choose(None, products=True)
    gpu(None)
    assert dispatch.choose(None) == dispatch.choose(None, products=True) == "xla"
    assert dispatch.target_capability() == 90  # programs are compiled for Hopper ahead of time
    with pytest.raises(ValueError, match="not 'cuda'"):
        dispatch.choose("cuda")


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
