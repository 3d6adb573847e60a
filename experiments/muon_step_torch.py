"""torch.optim.Muon for `muon_step`: on one device, or on DTensors over one process for each GPU."""

import json
import math
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

Shapes = list[tuple[int, int]]


def measure(shapes: Shapes, *, steps: int, iterations: int, median_ms: Callable) -> dict[str, Any]:
    """Time and memory of a step on all GPUs that are seen, or on the CPU."""
    processes = max(torch.cuda.device_count(), 1)
    if processes == 1:
        return _measure(shapes, 0, 1, steps, iterations, median_ms)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, _free_port(), shapes, steps, iterations, median_ms, folder)
        multiprocessing.spawn(_one_of_several, arguments, nprocs=processes)
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    slowest = max(found, key=lambda one: float(one["ms"]))
    return slowest | {key: max(one[key] for one in found) for key in ("peak", "extra_bytes")}


def _one_of_several(
    rank: int,
    processes: int,
    port: int,
    shapes: Shapes,
    steps: int,
    iterations: int,
    median_ms: Callable,
    folder: str,
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpus else "gloo", rank=rank, world_size=processes)
    found = _measure(shapes, rank, processes, steps, iterations, median_ms)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _measure(
    shapes: Shapes, rank: int, processes: int, steps: int, iterations: int, median_ms: Callable
) -> dict[str, Any]:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    rows = _by_rows(processes, device.type)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter(rows(_random(shape, 0.02, device)))
        param.grad = rows(_random(shape, 1e-3, device))
        params.append(param)
    optimizer = torch.optim.Muon(
        params, 1e-3, weight_decay=0.1, ns_steps=iterations, adjust_lr_fn="match_rms_adamw"
    )

    def run() -> None:
        for _ in range(steps):
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    run()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()  # 0 without a GPU, like the peak
    ms = median_ms(run)
    peak = torch.cuda.max_memory_allocated()
    momentum = sum(
        entry.numel() * entry.element_size()
        for state in optimizer.state.values()
        for entry in state.values()
    )
    return {
        "ms": ms,
        "devices": processes,
        "extra_bytes": peak - held,
        "peak": peak,
        "state_bytes_per_param": momentum / sum(map(math.prod, shapes)),
    }


def _by_rows(processes: int, device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Shards a matrix by rows over all processes, if there are several."""
    if processes == 1:
        return lambda whole: whole
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(device, (processes,))
    return lambda whole: distribute_tensor(whole, mesh, [Shard(0)])


def _random(shape: tuple[int, int], scale: float, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16) * scale


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
