"""Only the runs of the published table write its results file."""

import jax
import pytest

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
