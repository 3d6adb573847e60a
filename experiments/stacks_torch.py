"""Stacks of Llama layers in torch: eager, compiled, and with torchao's FP8."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from experiments.stacks import Measured, Sizes, Stack, measure


def torch_cases(sizes: Sizes, depths: list[int]) -> Iterator[tuple[str, Measured]]:
    """Each way's stacks, measured."""
    ways: dict[str, tuple[bool, str | None]] = {
        "torch BF16, eager": (False, None),
        "torch BF16, compiled": (True, None),
        "torchao float8 tensorwise, compiled": (True, "tensorwise"),
        "torchao float8 rowwise, compiled": (True, "rowwise"),
    }
    for name, (compiled, recipe) in ways.items():
        torch.compiler.reset()
        stacks = {depth: _prepare(sizes, depth, compiled, recipe) for depth in depths}
        yield name, measure(stacks)


def _prepare(sizes: Sizes, depth: int, compiled: bool, recipe: str | None) -> Stack:
    """A stack, and what its step takes beside what is on the device already."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp_norm = (nn.RMSNorm(sizes.width, 1e-6) for _ in range(2))
            for name, (inputs, outputs) in sizes.weights.items():
                setattr(self, name, nn.Linear(inputs, outputs, bias=False))

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            n = self.norm(x)
            q, k, v = (
                p(n).view(*x.shape[:2], -1, sizes.head).transpose(1, 2)
                for p in (self.q, self.k, self.v)
            )
            q, k = turn(q, cos, sin), turn(k, cos, sin)
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(o.transpose(1, 2).reshape(x.shape))
            n = self.mlp_norm(x)
            return x + self.down(functional.silu(self.gate(n)) * self.up(n))

    def turn(y: Any, cos: Any, sin: Any) -> Any:
        a, b = y.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    others = torch.cuda.memory_allocated() if device == "cuda" else 0
    with torch.device(device):
        layers = nn.ModuleList([Layer().bfloat16() for _ in range(depth)])
        frequencies = 1e4 ** -(torch.arange(0, sizes.head, 2) / sizes.head)
        angles = torch.arange(sizes.sequence)[:, None] * frequencies
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        shape = sizes.batch, sizes.sequence, sizes.width
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    if recipe:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(layers, config=config)
    if compiled:
        for i in range(depth):
            layers[i] = torch.compile(layers[i])

    def run() -> Any:
        y = x
        for layer in layers:
            y = layer(y, cos, sin)
        return y

    def step() -> None:
        for parameter in layers.parameters():
            parameter.grad = None
        x.grad = None
        run().backward(dy)

    def forward() -> None:
        with torch.no_grad():
            run()

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    step()  # compiles
    peak = 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        wait()
        peak = float(torch.cuda.max_memory_allocated() - others)
    return Stack(step, forward, wait, peak)
