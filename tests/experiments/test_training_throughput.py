"""Only the runs of the published table write its file, and GPUs are compared with each other."""

import json

import jax
import pytest

from experiments import training_throughput
from experiments.training_throughput import arguments, results_path


def name_of(monkeypatch, *given, gpus=1):
    monkeypatch.setattr(jax, "device_count", lambda: gpus)
    return results_path(arguments().parse_args(given)).name


def test_the_runs_of_the_table_write_its_file(monkeypatch):
    assert name_of(monkeypatch) == "training_throughput.json"
    assert name_of(monkeypatch, "COAT:8") == "training_throughput.json"
    published = "training_throughput_4_gpus_beside_one.json"
    assert name_of(monkeypatch, "--beside-one", gpus=4) == published


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["--remat", "layer_fp8"], "remat_layer_fp8"),
        (["--model", "tiny", "--sequence", "64"], "tiny_sequence_64"),
        (["--model", "configs/own.py"], "configs_own.py"),
        (["--layers", "2"], "2_layers"),
    ],
)
def test_runs_with_other_options_write_files_of_their_own(monkeypatch, given, name):
    assert name_of(monkeypatch, *given) == f"training_throughput_{name}.json"


@pytest.mark.parametrize("case", ["COAT", "COAT:", "COAT:x", "COAT:0", "COAT:-1", "COAT:8:offload"])
def test_a_case_of_another_form_is_refused(capsys, case):
    with pytest.raises(SystemExit):
        arguments().parse_args([case])
    assert f"{case!r} is not PRECISION:BATCH, as in COAT:16" in capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch):
    """Replaces the processes of two GPUs, which train 100 and 80 tokens a second alone."""

    def in_a_process(case, options, **variables):
        gpu = variables.get("CUDA_VISIBLE_DEVICES")
        if gpu is None:
            return {"tokens_per_second": 144, "devices": 2}
        return {"tokens_per_second": 100 - 20 * int(gpu)}

    monkeypatch.setattr(training_throughput, "count_gpus", lambda: 2)
    monkeypatch.setattr(training_throughput, "in_a_process", in_a_process)
    monkeypatch.setattr(training_throughput, "_line", str)
    monkeypatch.setattr(training_throughput, "draw", lambda path: None)

    def run(folder):
        given = ["training_throughput", "COAT:8", "--beside-one", "--out", str(folder)]
        monkeypatch.setattr("sys.argv", given)
        training_throughput.main()
        (case,) = json.loads(next(folder.glob("*.json")).read_text())["figures"]["cases"]
        return case

    return run


def test_several_gpus_are_compared_with_each_of_them_alone(measured, tmp_path):
    case = measured(tmp_path)
    assert [one["tokens_per_second"] for one in case["alone"]] == [100, 80]
    assert case["efficiency"] == 72 / 90
    assert case["beside_slowest"] == 72 / 80
