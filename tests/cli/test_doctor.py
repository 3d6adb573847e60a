"""`coat doctor`: code 0 where training works, and 1 with a remedy where it does not."""

import importlib.util
import json
import os

import jax
import pytest

from coat_jax import cli, nvidia
from coat_jax.cli import doctor
from coat_jax.kernels import dispatch


@pytest.fixture
def examined(monkeypatch, capsys):
    """Runs `coat doctor`, by default on a machine without an NVIDIA driver."""
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: None)

    def run(*arguments):
        code = cli.main(["doctor", *arguments])
        return code, capsys.readouterr().out

    return run


def test_a_cpu_without_a_gpu_can_train(examined):
    code, out = examined()
    assert code == 0
    assert f"jax {jax.__version__}" in out
    assert "XLA, without Triton kernels: there is no GPU" in out
    assert out.endswith("Training works here.\n")
    code, out = examined("--json")
    found = json.loads(out)
    assert (code, found["works"], found["problems"]) == (0, True, [])
    assert found["kernels"]["runs"] == "xla"
    assert len(found["devices"]) == jax.local_device_count()
    assert found["compilation_cache"]["free_bytes"] > 0


def test_memory_that_the_system_uses_as_a_cache_is_available(monkeypatch):
    text = "MemTotal:       23357548 kB\nMemFree:         5077 kB\nMemAvailable:   20000 kB\n"
    monkeypatch.setattr(doctor.Path, "read_text", lambda path: text)
    assert doctor._available_memory() == 20_480_000


@pytest.mark.parametrize(
    ("driver", "platforms", "fix"),
    [
        ("580.65.06", None, "pip install -U 'coat_jax[cuda13,train]'"),
        ("535.161", None, "pip install -U 'coat_jax[cuda12,train]'"),
        ("580.65.06", "cpu", "Unset JAX_PLATFORMS, which is 'cpu'"),
    ],
)
def test_a_gpu_that_jax_does_not_see_is_a_problem(examined, monkeypatch, driver, platforms, fix):
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: driver)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    code, out = examined()
    assert code == 1
    assert "JAX sees only the CPU" in out
    assert fix in out


@pytest.mark.parametrize(
    ("capability", "missing", "code", "said"),
    [
        (90, [], 0, "Triton kernels: the GPU has compute capability 9.0"),
        (90, ["triton", "jax_triton"], 0, "jax-triton and triton are not installed"),
        (90, ["jax_triton"], 0, "Triton: jax-triton is not installed"),
        (90, ["jax_triton"], 0, "pip install 'coat_jax[cuda13]'"),
        (80, [], 1, "--precision bf16"),
    ],
)
def test_the_reason_for_missing_kernels_is_named(
    examined, monkeypatch, capability, missing, code, said
):
    gpu = {"platform": "gpu", "kind": "H100", "compute_capability": "9.0", "free_bytes": 10**9}
    find = importlib.util.find_spec
    packages = dict.fromkeys(["triton", "jax_triton"], find("jax")) | dict.fromkeys(missing)
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: "580.65.06")
    monkeypatch.setattr(doctor, "_devices", lambda: [gpu])
    monkeypatch.setattr(dispatch, "gpu_capability", lambda: capability)
    monkeypatch.setattr(dispatch, "triton_installed", lambda: not missing)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: packages[name] if name in packages else find(name),
    )
    found, out = examined()
    assert found == code
    assert said in out


def test_a_missing_package_is_named(examined, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "grain" and find(name))
    code, out = examined()
    assert code == 1
    assert "needs grain" in out
    assert "pip install 'coat_jax[train]'" in out


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Unable to initialize backend 'cuda'"), "Unable to initialize backend"),
        (AssertionError(), "JAX_PLATFORMS is 'cuda', and no plugin for it starts"),
    ],
)
def test_a_platform_that_does_not_start_is_named(examined, monkeypatch, error, said):
    def fail():
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", fail)
    code, out = examined()
    assert code == 1
    assert f"JAX finds no device: {said}" in out
    assert "Install NVIDIA's driver" in out


@pytest.mark.parametrize(
    ("program", "version"),
    [
        ("#!/bin/sh\nprintf '580.65.06\n580.65.06\n'\n", "580.65.06"),
        ("#!/bin/sh\necho 535.161\n", "535.161"),
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
    monkeypatch.setattr(nvidia, "PATIENCE", 0.5 if "sleep" in program else nvidia.PATIENCE)
    (tmp_path / "nvidia-smi").write_text(program)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert doctor.nvidia_driver() == version


@pytest.fixture
def cache():
    """Tells JAX which compilation cache to use, as JAX_COMPILATION_CACHE_DIR does."""
    before = jax.config.values["jax_compilation_cache_dir"]
    yield lambda folder: jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_cache_that_cannot_be_used_is_named(examined, cache, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for below, said in (("file", "it is not a folder"), ("file/xla", "/file is not a folder")):
        cache(tmp_path / below)
        code, out = examined()
        assert code == 0
        assert said in out
        assert "Set JAX_COMPILATION_CACHE_DIR to another folder, or unset it." in out
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    cache(tmp_path / "new")
    assert f"{tmp_path} is not writable" in examined()[1]
    cache("")
    assert "Choose another folder: coat train NAME --cache FOLDER" in examined()[1]


def test_a_cache_elsewhere_is_not_looked_for_here(examined, cache):
    cache("gs://bucket/xla")
    code, out = examined()
    assert code == 0
    assert "gs://bucket/xla: not on this machine" in out
    assert json.loads(examined("--json")[1])["compilation_cache"]["entries"] is None
