"""Steps of AdamW of torch, torchao and bitsandbytes, and of Muon of torch.

Muon runs on one device, or on DTensors over one process for each GPU.
"""

import json
import math
import os
import socket
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from experiments.optimizer_step.cases import ITERATIONS, Case, calls, matrices, parameters
from experiments.timing import median_ms

Figures = dict[str, Any]


def adamw(case: Case, options: Namespace) -> Figures:
    """One of the optimizers of `cases.ADAMW`; gradients have the parameters' dtype."""
    dtype = getattr(torch, case["params"])
    shapes = parameters(case["model"], options.elements)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype))
        param.grad = torch.randn(shape, device="cuda", dtype=dtype) * 1e-3
        params.append(param)
    elements = sum(param.numel() for param in params)
    before = torch.cuda.memory_allocated()
    optimizer = adamw_named(case["optimizer"], params)
    optimizer.step()
    torch.cuda.synchronize()
    state_bytes = torch.cuda.memory_allocated() - before

    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    live = torch.cuda.memory_allocated()
    ms = median_ms(optimizer.step, torch.cuda.synchronize, warmup=1, batches=7, calls=calls(shapes))
    return {
        "ms": ms,
        "extra_bytes": torch.cuda.max_memory_allocated() - live,
        "state_bytes_per_param": state_bytes / elements,
    }


def adamw_named(name: str, params: list[torch.nn.Parameter]) -> Any:
    """The optimizer of this name."""
    settings: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if name == "torch AdamW fused":
        return torch.optim.AdamW(params, **settings, fused=True)
    if name.startswith("torchao"):
        import torchao.optim as library
    else:
        import bitsandbytes.optim as library
    return getattr(library, name.rsplit(maxsplit=1)[-1])(params, **settings)


def muon(case: Case, options: Namespace) -> Figures:
    """Time and memory of a step on all GPUs that are seen, or on the CPU."""
    del case
    shapes = matrices(options.model, options.layers)
    processes = max(torch.cuda.device_count(), 1)
    if processes == 1:
        return _measure_muon(shapes, 0, 1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, _free_port(), shapes, folder)
        multiprocessing.spawn(_one_of_several, arguments, nprocs=processes)
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    slowest = max(found, key=lambda one: float(one["ms"]))
    return slowest | {"extra_bytes": max(one["extra_bytes"] for one in found)}


def _one_of_several(
    rank: int, processes: int, port: int, shapes: list[tuple[int, int]], folder: str
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpus else "gloo", rank=rank, world_size=processes)
    found = _measure_muon(shapes, rank, processes)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _measure_muon(shapes: list[tuple[int, int]], rank: int, processes: int) -> Figures:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    rows = _by_rows(processes, device.type)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter(rows(_random(shape, 0.02, device)))
        param.grad = rows(_random(shape, 1e-3, device))
        params.append(param)
    optimizer = torch.optim.Muon(
        params, 1e-3, weight_decay=0.1, ns_steps=ITERATIONS, adjust_lr_fn="match_rms_adamw"
    )

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    optimizer.step()
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()  # 0 without a GPU, like the peak
    ms = median_ms(optimizer.step, wait, warmup=1, batches=5, calls=3)
    momentum = sum(
        entry.numel() * entry.element_size()
        for state in optimizer.state.values()
        for entry in state.values()
    )
    return {
        "ms": ms,
        "extra_bytes": torch.cuda.max_memory_allocated() - held,
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
