"""What the communication experiment reads from a profile."""

import gzip
import json

import pytest

from experiments.communication import Timeline, read, total, uncovered, union


def test_profile_is_read_by_gpu_and_by_kind_of_kernel(tmp_path):
    processes = {1: "/device:GPU:0", 2: "/host:CPU"}
    threads = {(1, 7): "Stream #7", (1, 8): "XLA Ops", (2, 9): "Stream #9"}
    ran = [  # name, process, thread, begin and duration in us
        ("gemm", 1, 7, 1000.0, 500.0),
        ("ncclDevKernel_AllGather", 1, 7, 1200, 800),
        ("fusion", 1, 8, 0.0, 5000.0),
        ("host", 2, 9, 0.0, 5000.0),
    ]
    events = [
        *({"name": "process_name", "pid": p, "args": {"name": n}} for p, n in processes.items()),
        *(
            {"name": "thread_name", "pid": p, "tid": t, "args": {"name": n}}
            for (p, t), n in threads.items()
        ),
        *(
            {"name": n, "ph": "X", "pid": p, "tid": t, "ts": begin, "dur": duration}
            for n, p, t, begin, duration in ran
        ),
    ]
    file = tmp_path / "plugins" / "host.trace.json.gz"
    file.parent.mkdir()
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    (gpu,) = read(tmp_path).items()
    assert gpu == ("0", Timeline([(0.0, 0.5)], [(0.2, 1.0)]))
    assert gpu[1].summary() == pytest.approx(
        {"step_ms": 1.0, "compute_ms": 0.5, "communication_ms": 0.8, "exposed_ms": 0.5}
    )


def test_intervals_are_joined_and_what_nothing_covers_is_found():
    communication, compute = [(0.0, 4.0), (6.0, 7.0)], [(1.0, 2.0), (3.0, 5.0)]
    assert uncovered(communication, compute) == [(0.0, 1.0), (2.0, 3.0), (6.0, 7.0)]
    assert total(uncovered(communication, communication)) == 0
    intervals = [(4.0, 5.0), (1.0, 2.0), (1.5, 3.0)]
    assert union(intervals, origin=1.0) == [(0.0, 2.0), (3.0, 4.0)]
    assert union(intervals, gap=1.0) == [(1.0, 5.0)]
