"""`coat doctor`: code 0 where training works, and 1 with a remedy where it does not."""

import importlib.util
import os
from unittest import mock

import jax
import pytest

from coat_jax import cli
from coat_jax.cli import doctor
from coat_jax.kernels import dispatch
from coat_jax.training import compilation


@pytest.fixture
def examined(monkeypatch, capsys):
    """Runs `coat doctor` on a machine with this NVIDIA driver."""

    def run(driver=None):
        monkeypatch.setattr(doctor, "nvidia_driver", lambda: driver)
        code = cli.main(["doctor"])
        return code, " ".join(capsys.readouterr().out.split())

    return run


@pytest.fixture
def configured():
    """Configures JAX, as JAX_PLATFORMS does."""
    before = jax.config.values["jax_platforms"]
    yield lambda value: jax.config.update("jax_platforms", value)
    jax.config.update("jax_platforms", before)


STATS = {"bytes_limit": 80 * 10**9, "bytes_in_use": 5 * 10**9}
GPU = mock.Mock(platform="gpu", device_kind="H100", compute_capability="9.0")
GPU.memory_stats.return_value = STATS


def test_a_cpu_without_a_gpu_can_train(examined):
    code, out = examined()
    assert code == 0
    assert f"jax {jax.__version__}" in out
    assert "kernels XLA, because there is no GPU" in out
    assert out.count("device cpu, cpu") == jax.local_device_count()
    assert "problem" not in out
    assert out.endswith("Training works here.")


@pytest.mark.parametrize(
    ("driver", "platforms", "fix"),
    [
        ("580.65.06", "", "pip install -U 'coat_jax[cuda13,train]'"),
        ("535.161", "", "pip install -U 'coat_jax[cuda12,train]'"),
        ("580.65.06", "cpu", "Unset JAX_PLATFORMS, which is 'cpu'"),
    ],
)
def test_a_gpu_that_jax_does_not_see_is_a_problem(examined, configured, driver, platforms, fix):
    configured(platforms)
    code, out = examined(driver=driver)
    assert code == 1
    assert "JAX sees only the CPU" in out
    assert fix in out


@pytest.mark.parametrize(
    ("capability", "missing", "code", "said"),
    [
        (90, [], 0, "kernels Triton, because the GPU has compute capability 9.0"),
        (90, [], 0, "device gpu, H100, compute capability 9.0, 75.00 GB free"),
        (90, ["triton", "jax_triton"], 0, "because packages are not installed: jax-triton, triton"),
        (
            90,
            ["jax_triton"],
            0,
            "installed: jax-triton; for Triton, pip install -U 'coat_jax[cuda13",
        ),
        (80, [], 1, "--precision bf16"),
    ],
)
def test_the_reason_for_missing_kernels_is_named(
    examined, monkeypatch, capability, missing, code, said
):
    find = importlib.util.find_spec
    packages = dict.fromkeys(["triton", "jax_triton"], find("jax")) | dict.fromkeys(missing)
    monkeypatch.setattr(jax, "local_devices", lambda: [GPU])
    monkeypatch.setattr(dispatch, "gpu_capability", lambda: capability)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: packages[name] if name in packages else find(name),
    )
    found, out = examined(driver="580.65.06")
    assert found == code
    assert said in out


def test_a_missing_package_is_named(examined, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "grain" and find(name))
    code, out = examined()
    assert code == 1
    assert "needs grain: not installed. fix: pip install -U 'coat_jax[gpu,train]'" in out


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Unable to initialize backend 'cuda'"), "Unable to initialize backend"),
        (AssertionError(), "JAX_PLATFORMS is 'cuda', and no plugin for it starts"),
    ],
)
def test_a_platform_that_does_not_start_is_named(examined, monkeypatch, configured, error, said):
    def fail():
        raise error

    configured("cuda")
    monkeypatch.setattr(jax, "devices", fail)
    code, out = examined()
    assert code == 1
    assert f"JAX finds no device: {said}" in out
    assert "Install NVIDIA's driver. Unset JAX_PLATFORMS, which is 'cuda'." in out


@pytest.mark.parametrize(
    ("program", "version"),
    [
        ("#!/bin/sh\nprintf '580.65.06\n580.65.06\n'\n", "580.65.06"),
        ("#!/bin/sh\necho '[N/A]'\n", None),
        ("#!/bin/sh\necho 580\n", None),
        ("#!/bin/sh\nprintf '\\377\n'\n", None),
        ("#!/bin/sh\n", None),
        ("#!/bin/sh\necho 580.65.06\nexit 9\n", None),
        ("#!/bin/sh\nexec sleep 60\n", None),
        ("\0", None),
    ],
)
def test_a_driver_is_one_with_a_version_number(program, version, tmp_path, monkeypatch):
    """Another nvidia-smi says it, fails, hangs, or is no program."""
    monkeypatch.setattr(compilation, "PATIENCE", 0.5 if "sleep" in program else 30)
    (tmp_path / "nvidia-smi").write_text(program)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert doctor.nvidia_driver() == version
