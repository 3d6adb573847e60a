"""Only the runs of the published table write its file, and GPUs are compared with each other."""

import json

import jax
import pytest

from experiments import training_throughput
from experiments.training_throughput import arguments, results_path


@pytest.mark.parametrize(
    ("given", "gpus", "name"),
    [
        ("COAT:8", 1, ""),
        ("--beside-one", 4, "_4_gpus_beside_one"),
        ("--model tiny --sequence 64", 1, "_tiny_sequence_64"),
        ("--layers 2", 1, "_2_layers"),
        ("--mesh data=2,fsdp=4", 8, "_8_gpus_data_2_fsdp_4"),
    ],
)
def test_runs_with_other_options_than_the_table_write_other_files(monkeypatch, given, gpus, name):
    monkeypatch.setattr(jax, "device_count", lambda: gpus)
    path = results_path(arguments().parse_args(given.split()))
    assert path.name == f"training_throughput{name}.json"


@pytest.mark.parametrize("case", ["COAT", "COAT:x", "COAT:0", "COAT:8:offload"])
def test_a_case_of_another_form_is_refused(capsys, case):
    with pytest.raises(SystemExit):
        arguments().parse_args([case])
    assert f"{case!r} is not PRECISION:BATCH, as in COAT:16" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", ["data", "data=two"])
def test_a_mesh_of_another_form_is_refused(capsys, mesh):
    with pytest.raises(SystemExit):
        arguments().parse_args(["--mesh", mesh])
    assert f"{mesh!r} is not as in data=2,fsdp=4" in capsys.readouterr().err


def test_several_gpus_are_compared_with_each_of_them_alone(monkeypatch, tmp_path):
    """Two, which train 100 and 80 tokens a second alone, and 144 together."""

    def in_a_process(case, options, alone=None):
        speed = 144 if alone is None else 100 - 20 * alone
        return {"tokens_per_second": speed, "devices": 2}

    monkeypatch.setattr(training_throughput, "count_gpus", lambda: 2)
    monkeypatch.setattr(training_throughput, "in_a_process", in_a_process)
    monkeypatch.setattr(training_throughput, "_line", str)
    monkeypatch.setattr(training_throughput, "draw", lambda path: None)
    given = ["training_throughput", "COAT:8", "--beside-one", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", given)
    training_throughput.main()
    (case,) = json.loads(next(tmp_path.glob("*.json")).read_text())["figures"]["cases"]
    assert [one["tokens_per_second"] for one in case["alone"]] == [100, 80]
    assert case["efficiency"] == 72 / 90
