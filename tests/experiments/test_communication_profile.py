"""What the communication experiment reads from a profile."""

import gzip
import json

import pytest

from experiments.communication import Timeline, read, total, uncovered, union


def test_profile_is_read_by_gpu_and_by_kind_of_kernel(tmp_path):
    events = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"name": "process_name", "ph": "M", "pid": 2, "args": {"name": "/host:CPU"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 7, "args": {"name": "Stream #7"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 8, "args": {"name": "XLA Ops"}},
        {"name": "thread_name", "ph": "M", "pid": 2, "tid": 9, "args": {"name": "Stream #9"}},
        {"name": "gemm", "ph": "X", "pid": 1, "tid": 7, "ts": 1000.0, "dur": 500.0},
        {"name": "ncclDevKernel_AllGather", "ph": "X", "pid": 1, "tid": 7, "ts": 1200, "dur": 800},
        {"name": "fusion", "ph": "X", "pid": 1, "tid": 8, "ts": 0.0, "dur": 5000.0},
        {"name": "host", "ph": "X", "pid": 2, "tid": 9, "ts": 0.0, "dur": 5000.0},
    ]
    file = tmp_path / "plugins" / "host.trace.json.gz"
    file.parent.mkdir()
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    (gpu,) = read(tmp_path).items()
    assert gpu == ("0", Timeline([(0.0, 0.5)], [(0.2, 1.0)]))
    assert gpu[1].summary() == pytest.approx(
        {"step_ms": 1.0, "compute_ms": 0.5, "communication_ms": 0.8, "exposed_ms": 0.5}
    )


def test_exposed_parts_are_those_that_nothing_covers():
    communication = [(0.0, 4.0), (6.0, 7.0)]
    compute = [(1.0, 2.0), (3.0, 5.0)]
    assert uncovered(communication, compute) == [(0.0, 1.0), (2.0, 3.0), (6.0, 7.0)]
    assert uncovered(communication, []) == communication
    assert total(uncovered(communication, communication)) == 0


def test_union_joins_what_overlaps_or_is_close():
    intervals = [(4.0, 5.0), (1.0, 2.0), (1.5, 3.0)]
    assert union(intervals, origin=1.0) == [(0.0, 2.0), (3.0, 4.0)]
    assert union(intervals, gap=1.0) == [(1.0, 5.0)]
