"""What torch saves of a Llama layer for its backward pass, operator by operator.

    python -m experiments.stacks.saved_by_torch SIZES      a line of JSON for each way

`activation_memory` runs this in a process of its own.

The tensors that autograd saves are counted, each storage once, without parameters. On a GPU the
allocator is asked as well: the memory after the forward pass, less that before the input existed,
less the output.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from experiments.stacks import Sizes
from experiments.stacks.in_torch import DEVICE, WAYS, make_angles, make_input, make_layers


def torch_kept(
    sizes: Sizes, operators: dict[str, str]
) -> Iterator[tuple[str, dict[str, float], dict[str, float]]]:
    """Each way's name, U counted and U allocated by operator.

    Args:
        sizes: of the layer.
        operators: methods of `Layer`, and what the tables call them.
    """
    for way, (compiled, recipe) in WAYS.items():
        torch.compiler.reset()
        (layer,) = make_layers(sizes, 1, recipe)
        angles = make_angles(sizes)
        counted, allocated = {}, {}
        for method, title in operators.items():
            function = torch.compile(getattr(layer, method)) if compiled else getattr(layer, method)
            run = partial(_run, function, method, sizes, angles)
            run()  # compiles
            counted[title] = _counted(run, layer) / sizes.unit
            if DEVICE == "cuda":
                allocated[title] = _allocated(run) / sizes.unit
        yield way, counted, allocated


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


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    for way, counted, allocated in torch_kept(Sizes(**request["sizes"]), request["operators"]):
        print(json.dumps({"way": way, "counted": counted, "allocated": allocated}), flush=True)
