"""How fast models generate in INT8, FP8 and INT4 beside BF16, and what memory they take.

    python -m experiments.quantized_generation                              on two GPUs, or one
    python -m experiments.quantized_generation int8 bf16 --models llama_124m --cache int8
    python -m experiments.quantized_generation --models llama_tiny --prompt 16 --new 8    anywhere

A case is a format and how activations are rounded, as in int8:static; the default is dynamic. With
int4, activations are rounded to FP8, and with int4:none they are not. Each case is measured with
every format of the cache. Models are configs that come with the package, with random parameters:
neither time nor memory depends on their values. The phases

    prefill    the prompts of a batch of texts, through to the logits of their last tokens
    decode     then one token of each text at a time, always the likeliest

are timed by the median of several calls; as in `coat.generation`, calls that decode follow each
other without waiting for the host. "parameters" are the bytes of all arrays of the model. Each case
has a process and a GPU of its own; on several GPUs, cases run side by side.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from experiments.command import parser_of
from experiments.timing import median_ms
from experiments.workers import count_gpus, only, outcome, run_worker

CASES = ("bf16", "int8", "fp8", "int4")
MORE_CASES = ("int8:static", "int8:none", "fp8:static", "fp8:none", "int4:none")
MODELS = ("llama2_7b",)
CACHES = ("none", "int8")
BATCHES = (1, 16, 64)
CALLS = 5
IN_A_ROW = 4  # calls that decode

Case = dict[str, Any]


def main() -> None:
    """Measures every case in its own process, prints a line for each and writes the results."""
    options = arguments().parse_args()
    if options.worker:
        print(json.dumps(measure(options)), flush=True)
        return
    from experiments import records

    cases: list[Case] = []
    for case in _run_all(options):
        cases.append(case)
        print(_line(case), flush=True)
        figures = {
            "prompt": options.prompt,
            "new": options.new,
            "cases": cases,
        }
        records.write(options.out / "quantized_generation.json", figures)


def arguments() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    more = f"what to measure: also {', '.join(MORE_CASES)}"
    add("cases", nargs="*", default=CASES, metavar="FORMAT[:ACTIVATIONS]", help=more)
    add("--models", nargs="+", default=MODELS, help="configs that come with the package")
    add("--batches", nargs="+", type=int, default=BATCHES, help="how many texts at a time")
    add("--prompt", type=int, default=1024, help="tokens of each prompt")
    add("--new", type=int, default=64, help="tokens that are decoded after it")
    formats = "none", "int8", "fp8", "int4"
    add("--cache", nargs="+", choices=formats, default=CACHES, help="formats of keys and values")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _run_all(options: argparse.Namespace) -> Iterator[Case]:
    """All cases of all models in their order, each on the first GPU that is idle."""
    gpus, idle = count_gpus(), SimpleQueue[dict[str, str]]()
    for variables in [only([gpu]) for gpu in range(gpus)] or [{}]:
        idle.put(variables)

    sizes = [f"--prompt={options.prompt}", f"--new={options.new}", "--batches"]
    sizes += map(str, options.batches)

    def run(work: tuple[str, str, str]) -> Case:
        model, cache, case = work
        worker = ["experiments.quantized_generation", case, "--worker", "--models", model]
        variables = idle.get()
        try:
            ended = run_worker(*worker, "--cache", cache, *sizes, **variables)
            return {"model": model, "case": case, "cache": cache, **outcome(ended)}
        finally:
            idle.put(variables)

    with ThreadPoolExecutor(max(1, gpus)) as pool:
        yield from pool.map(run, itertools.product(options.models, options.cache, options.cases))


def _line(case: Case) -> str:
    head = f"{case['model']:11} {case['case']:12} cache {case['cache']:5}"
    if "failed" in case:
        return f"{head} {case['failed']}"
    rates = "   ".join(
        f"{one['batch']} texts: {one['prefill_tokens_per_second']:9,.0f} and "
        f"{one['decode_tokens_per_second']:7,.0f} tokens/s"
        for one in case["batches"]
    )
    return f"{head} {case['parameters'] / 1e9:6.2f} GB   {rates}"


# --- One case --------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> Case:
    """A case in this process."""
    import jax
    from flax import nnx

    (name,), (case,), (cache,) = options.models, options.cases, options.cache
    model = model_of(name, case, options.prompt + options.new)
    graph, state = nnx.split(model)
    lowered = [
        program
        for batch in options.batches
        for program in _lowered(graph, state, batch, options, None if cache == "none" else cache)
    ]
    with ThreadPoolExecutor() as pool:
        compiled = [*pool.map(lambda program: program.compile(), lowered)]
    return {
        "model": name,
        "case": case,
        "cache": cache,
        "parameters": sum(array.nbytes for array in jax.tree.leaves(state)),
        "batches": [
            _batch(model, batch, options.prompt, options.new, begin, go_on)
            for batch, begin, go_on in zip(
                options.batches, compiled[::2], compiled[1::2], strict=True
            )
        ],
    }


def model_of(name: str, case: str, length: int) -> Any:
    """A model with random parameters, in BF16 or quantized, made where they stay."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    from flax import nnx

    from coat_jax import models, quantization
    from coat_jax.nn import MeshAxes
    from coat_jax.quantization.projections import paths_of
    from coat_jax.training.config_files import load_config

    config = quantization.inference_config(load_config(name).model)
    both: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    config = dataclasses.replace(
        config, axes=MeshAxes(), batch_axes=(), context=max(config.context, length), **both
    )
    format, _, activations = case.partition(":")
    if format == "bf16":
        graph, state = models.abstract(config)
    else:
        recipe = quantization.Recipe(format=format, activations=activations or "dynamic")
        scheme = quantization.Scheme(recipe.format, recipe.activations)
        graph, state = quantization.abstract(config, dict.fromkeys(paths_of(config), scheme))
    flat = nnx.to_flat_state(state)
    keys = jax.random.split(jax.random.key(0), len(flat))
    # One program for all parameters of a kind and shape: a model has hundreds of them.
    drawn = jax.jit(_draw, static_argnums=(1, 2, 3))
    filled = {
        path: leaf.replace(drawn(key, _kind(path, leaf), leaf.get_value(), config.width))
        for key, (path, leaf) in zip(keys, flat, strict=True)
    }
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _kind(path: tuple[Any, ...], leaf: Any) -> str:
    """The kind of a parameter, which decides how its values are drawn."""
    if len(path) > 1 and path[-2] == "norm":
        return "norm"
    if path[-1] in ("codes", "scale") and leaf.dtype in ("uint8", "bfloat16"):
        return f"int4 {path[-1]}"
    return str(path[-1]) if path[-1] in ("codes", "input_scale", "scale") else "weight"


def _draw(key: Any, kind: str, like: Any, width: int) -> Any:
    """Values of the size that a model's have before it is trained."""
    import jax
    import jax.numpy as jnp

    size = width**-0.5
    if kind == "int4 codes":
        return jax.random.bits(key, like.shape, like.dtype)
    if kind == "codes":
        return (30 * jax.random.normal(key, like.shape, jnp.bfloat16)).astype(like.dtype)
    if kind == "weight" and like.ndim > 1:
        return jax.random.normal(key, like.shape, like.dtype) * jnp.asarray(size, like.dtype)
    scales = {"input_scale": 1 / 32, "scale": size / 30, "int4 scale": size / 5}
    constant = scales.get(kind, 1.0 if kind == "norm" else size)
    return jnp.full(like.shape, constant, like.dtype)


def _lowered(
    graph: Any, state: Any, batch: int, options: argparse.Namespace, cache_format: Any
) -> tuple[Any, Any]:
    """The programs of prefill and of decoding, not compiled yet."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from coat_jax.generation import decode, prefill

    def begin(state: Any, tokens: jax.Array, starts: jax.Array) -> Any:
        slots = options.prompt + options.new
        logits, cache = prefill(nnx.merge(graph, state), tokens, starts, slots, cache=cache_format)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    def go_on(state: Any, tokens: jax.Array, cache: Any) -> Any:
        model = nnx.merge(graph, state)

        def step(carry: Any, _: None) -> Any:
            logits, cache = decode(model, *carry)
            return (jnp.argmax(logits, axis=-1).astype(jnp.int32), cache), None

        return jax.lax.scan(step, (tokens, cache), None, length=options.new)[0]

    tokens, starts = (
        jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, options.prompt), (batch,))
    )
    first = jax.jit(begin)
    chosen, cache = jax.eval_shape(first, state, tokens, starts)
    rest = jax.jit(go_on, donate_argnums=2)
    return first.lower(state, tokens, starts), rest.lower(state, chosen, cache)


def _batch(model: Any, batch: int, prompt: int, new: int, begin: Any, go_on: Any) -> Case:
    """Prefill and decoding of a number of texts, by their programs."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    state = nnx.state(model)
    tokens = jax.random.randint(
        jax.random.key(1), (batch, prompt), 0, model.config.vocab, jnp.int32
    )
    starts = jnp.zeros(batch, jnp.int32)
    prefill_ms = _ms(lambda: begin(state, tokens, starts))
    chosen, cache = begin(state, tokens, starts)  # now: there is not room for many large caches
    cache_bytes = sum(array.nbytes for array in jax.tree.leaves(cache.past))

    def decode_again() -> jax.Array:
        """Decodes into the same slots of the cache as before."""
        nonlocal cache
        tokens, cache = go_on(state, chosen, cache._replace(filled=jnp.int32(prompt)))
        return tokens

    decode_ms = _ms(decode_again, IN_A_ROW)
    return {
        "batch": batch,
        "prefill_tokens_per_second": 1e3 * batch * prompt / prefill_ms,
        "decode_tokens_per_second": 1e3 * batch * new / decode_ms,
        "cache": cache_bytes,
    }


def _ms(call: Callable[[], Any], in_a_row: int = 1) -> float:
    """The median time of a call, after one that does not count."""
    import jax

    latest: list[Any] = []

    def run() -> None:
        latest.clear()
        latest.append(call())

    def wait() -> None:
        jax.block_until_ready(latest)

    return median_ms(run, wait, warmup=1, batches=CALLS, calls=in_a_row)


if __name__ == "__main__":
    main()
