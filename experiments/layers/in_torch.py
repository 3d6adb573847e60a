"""Stacks of Llama layers in torch: eager, compiled, and with torchao's FP8."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from experiments.layers import Measured, Sizes, Stack, measure

# Compiled or eager; the recipe of torchao's FP8.
WAYS: dict[str, tuple[bool, str | None]] = {
    "torch BF16, eager": (False, None),
    "torch BF16, compiled": (True, None),
    "torchao float8 tensorwise, compiled": (True, "tensorwise"),
    "torchao float8 rowwise, compiled": (True, "rowwise"),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cases(sizes: Sizes, depths: list[int]) -> Iterator[tuple[str, Measured]]:
    """Each way's stacks, measured."""
    for name, (compiled, recipe) in WAYS.items():
        torch.compiler.reset()
        stacks = {depth: _prepare(sizes, depth, compiled, recipe) for depth in depths}
        yield name, measure(stacks)


class Layer(nn.Module):
    """Llama's layer: the three operators below."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.head
        self.norm, self.mlp_norm = (nn.RMSNorm(sizes.width, 1e-6) for _ in range(2))
        for name, (inputs, outputs) in sizes.weights.items():
            setattr(self, name, nn.Linear(inputs, outputs, bias=False))

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """The layer's output."""
        return self.mlp(x + self.attention(*self.attention_input(x, cos, sin)))

    def attention_input(self, x: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
        """The norm, the projections to query, key and value, and rotary embeddings."""
        n = self.norm(x)
        q, k, v = (
            project(n).view(*x.shape[:2], -1, self.head).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        return turn(q, cos, sin), turn(k, cos, sin), v

    def attention(self, q: Any, k: Any, v: Any) -> Any:
        """Attention and the output projection."""
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o(o.reshape(*o.shape[:2], -1))

    def mlp(self, x: Any) -> Any:
        """From the second norm to the residual sum."""
        n = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(n)) * self.up(n))


def turn(y: Any, cos: Any, sin: Any) -> Any:
    """Rotary embeddings."""
    a, b = y.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def make_layers(sizes: Sizes, depth: int, recipe: str | None) -> nn.ModuleList:
    """Random layers in BF16, their products in FP8 by a recipe of torchao or not."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        layers = nn.ModuleList([Layer(sizes).bfloat16() for _ in range(depth)])
    if recipe:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(layers, config=config)
    return layers


def make_angles(sizes: Sizes) -> tuple[Any, Any]:
    """Cosines and sines of rotary embeddings."""
    frequencies = 1e4 ** -(torch.arange(0, sizes.head, 2, device=DEVICE) / sizes.head)
    angles = torch.arange(sizes.sequence, device=DEVICE)[:, None] * frequencies
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def make_input(sizes: Sizes) -> Any:
    """A random residual stream."""
    shape = sizes.batch, sizes.sequence, sizes.width
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)


def _prepare(sizes: Sizes, depth: int, compiled: bool, recipe: str | None) -> Stack:
    """A stack, and what its forward pass saves."""
    layers = make_layers(sizes, depth, recipe)
    cos, sin = make_angles(sizes)
    x = make_input(sizes)
    dy = torch.randn_like(x)
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
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    step()  # compiles
    saved = 0.0
    if DEVICE == "cuda":
        wait()
        before = torch.cuda.memory_allocated()
        y = run()
        wait()
        saved = float(torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes())
        del y
    return Stack(step, forward, wait, saved)


# --- What a layer saves ----------------------------------------------------------------------


def saved(sizes: Sizes, titles: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """For each way the U counted and, on a GPU, the U allocated, by the title of an operator."""
    for way, (compiled, recipe) in WAYS.items():
        torch.compiler.reset()
        (layer,) = make_layers(sizes, 1, recipe)
        angles = make_angles(sizes)
        counted, allocated = {}, {}
        for method, title in titles.items():
            function = torch.compile(getattr(layer, method)) if compiled else getattr(layer, method)
            run = partial(_run, function, method, sizes, angles)
            run()  # compiles
            counted[title] = _counted(run, layer) / sizes.unit
            if DEVICE == "cuda":
                allocated[title] = _allocated(run) / sizes.unit
        yield {"way": way, "counted": counted, "allocated": allocated}


def _run(function: Callable[..., Any], method: str, sizes: Sizes, angles: tuple[Any, Any]) -> Any:
    """A method of `Layer` on arguments of its own, which nobody else holds."""
    if method == "attention":
        shape = sizes.batch, sizes.width // sizes.head, sizes.sequence, sizes.head
        heads = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
        return function(*(y.requires_grad_() for y in heads))
    return function(make_input(sizes), *(() if method == "mlp" else angles))


def _counted(run: Callable[[], Any], layer: Any) -> int:
    """The bytes that autograd saves."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run()  # keeps what is saved alive, so that no address is used twice
    del outputs
    return sum(saved.values())


def _allocated(run: Callable[[], Any]) -> int:
    """The bytes that the allocator holds for the backward pass."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    outputs = run()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    every = outputs if isinstance(outputs, tuple) else (outputs,)
    return after - before - sum(y.untyped_storage().nbytes() for y in every)
