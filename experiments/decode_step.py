"""What a GPU does for one more token of each text: its launches, and the bytes that it must read.

    python -m experiments.decode_step        with XLA's CUDA plugin; computes nothing
    python -m experiments.decode_step --format fp8 --cache none --texts 1

Llama-2-7B in W4A8 with a cache in INT8, compiled for an H100. A launch is a kernel, a product of
cuBLAS, or a fusion of XLA. Those of a layer are the difference between models of 3 and 2 layers, so
they may be off by one where XLA fuses what all layers share. On a GPU XLA may choose its own Triton
GEMMs, which are not here.

    floor     bytes of all parameters but the embedding, and of the filled slots of the cache, at
              4.2 TB/s, which is what an H200 reads
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import models, quantization
from coat_jax.generation import Sampling, continuation
from coat_jax.nn import MeshAxes
from coat_jax.quantization.projections import paths_of
from coat_jax.training.config_files import load_config
from experiments import records
from experiments.command import parser_of
from experiments.hopper import OPTIONS, compile_for, hopper_mesh, there
from experiments.rotation import nbytes

BYTES_PER_SECOND = 4.2e12
FORMATS = ("bf16", "int8", "fp8", "int4")
CACHES = ("none", "int8", "fp8", "int4")
INSTRUCTION = re.compile(r"^  (?:ROOT )?%\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(")
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while"}

Launches = Counter[str]


class Step(NamedTuple):
    """The launches of a step, and the bytes of parameters and of the cache."""

    launches: Launches
    parameters: int
    past: int


def main() -> None:
    """Prints a table and writes the results."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", default="llama2_7b", help="a config that comes with the package")
    add("--format", choices=FORMATS, default="int4", help="of the projections")
    add("--cache", choices=CACHES, default="int8", help="of keys and values")
    add("--texts", nargs="+", type=int, default=[1, 16, 64], help="how many at a time")
    add("--slots", type=int, default=1056, help="that are filled, of each text")
    options = parser.parse_args()
    cases = []
    for texts in options.texts:
        case = measure(options.model, options.format, options.cache, texts, options.slots)
        cases.append(case)
        print("\n".join(lines(case)), flush=True)
        named = {key: getattr(options, key) for key in ("model", "format", "cache", "slots")}
        records.write(options.out / "decode_step.json", {**named, "cases": cases})


def measure(name: str, format: str, cache: str, texts: int, slots: int) -> dict[str, Any]:
    """The launches and bytes of a step."""
    config = quantization.inference_config(load_config(name).model)
    both: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    context = max(config.context, slots)
    config = dataclasses.replace(config, axes=MeshAxes(), batch_axes=(), context=context, **both)
    two, three = (
        _compile(dataclasses.replace(config, layers=layers), format, cache, texts, slots)
        for layers in (2, 3)
    )
    of_layer = three.launches - two.launches
    rest = two.launches - of_layer - of_layer
    layers = config.layers
    parameters, past = (
        few + (many - few) * (layers - 2)
        for few, many in ((two.parameters, three.parameters), (two.past, three.past))
    )
    return {
        "texts": texts,
        "layer": dict(of_layer),
        "rest": dict(rest),
        "launches": layers * of_layer.total() + rest.total(),
        "parameters": parameters,
        "cache": past,
        "floor_ms": 1e3 * (parameters + past) / BYTES_PER_SECOND,
    }


def _compile(config: models.Config, format: str, cache: str, texts: int, slots: int) -> Step:
    """The step of a model, as `generation` runs it."""
    mesh = hopper_mesh((1,), ("x",))
    if format == "bf16":
        graph, state = models.abstract(config, mesh=mesh)
    else:
        scheme: Any = quantization.Scheme(format, "dynamic")  # type: ignore[arg-type]
        schemes = dict.fromkeys(paths_of(config), scheme)
        graph, state = quantization.abstract(config, schemes, mesh=mesh)
    greedy, of_past = Sampling(temperature=0), None if cache == "none" else cache

    def array(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def begin(state: Any, stops: Any, *inputs: Any) -> Any:
        arguments = greedy, stops, graph, state, slots, of_past, *inputs
        return continuation._begin.__wrapped__(*arguments)

    def go_on(state: Any, stops: Any, session: Any) -> Any:
        return continuation._continue.__wrapped__(greedy, stops, graph, state, session)

    each = array((texts,))
    inputs = array((texts, 16)), each, each, array((texts,), jnp.uint32)
    with there():
        _, session = jax.eval_shape(begin, state, each, *inputs)
        session = jax.tree.map(lambda x: array(x.shape, x.dtype), session)
        how = {"compiler_options": OPTIONS, "donate_argnums": 2}
        program = compile_for(mesh, go_on, state, each, session, **how).as_text()
    embedding = nbytes(nnx.to_pure_dict(state)["embed"])
    past = nbytes(session.cache.past)
    return Step(launches_of(program), nbytes(state) - embedding, past)


def launches_of(program: str) -> Launches:
    """The launches in the body of a program's only loop, by their kinds."""
    (body,) = re.findall(r"\bbody=%([\w.-]+)", program)
    start = program.index(f"\n%{body} (") + 1
    found: Launches = Counter()
    for line in program[start : program.index("\n}", start)].splitlines()[1:]:
        match = INSTRUCTION.match(line)
        if match and match[1] not in FREE:
            found[_kind(match[1], line)] += 1
    return found


def _kind(operation: str, line: str) -> str:
    if operation == "custom-call":
        kernel = re.search(r'backend_config=\{[^"]*?name = "(\w+)"', line)
        return kernel[1] if kernel else "cuBLAS"
    if operation == "fusion":
        return "fusion with a sum" if "kind=kInput" in line else "other fusion"
    return operation


def lines(case: dict[str, Any]) -> Iterator[str]:
    """The table of a number of texts."""
    kinds = sorted({*case["layer"], *case["rest"]}, key=lambda kind: -case["layer"].get(kind, 0))
    yield f"{case['texts']} texts: {case['launches']} launches       a layer   besides"
    for kind in kinds:
        yield f"    {kind:26} {case['layer'].get(kind, 0):9} {case['rest'].get(kind, 0):9}"
    sizes = f"parameters {case['parameters'] / 1e9:.2f} GB, cache {case['cache'] / 1e9:.2f} GB"
    rate = 1e3 * case["texts"] / case["floor_ms"]
    yield f"    {sizes}: floor {case['floor_ms']:.2f} ms, {rate:,.0f} tokens/s"


if __name__ == "__main__":
    main()
