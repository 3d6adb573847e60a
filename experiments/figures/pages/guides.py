"""The figures of the pages that have few, almost all of them settings."""

from coat_jax.training.config import CheckpointConfig, EvaluationConfig, OptimizerConfig
from experiments.figures.compare import Given, Page, Sentence, Table
from experiments.figures.measured.files import GB, case, of
from experiments.figures.measured.throughput import slower, together, training
from experiments.figures.pages.reasons import ARITHMETIC, PUBLISHED, SETTING, TESTED

EXAMPLES = {  # by results file and name
    ("examples_memory", "flax_nnx"): "Flax NNX",
    ("examples_memory", "flax_linen"): "Flax Linen",
    ("examples_memory", "flax_lora"): "Flax NNX with LoRA, base weights in FP8",
    ("examples_memory", "qwix_provider"): "Qwix",
    ("examples_memory", "equinox_loop"): "Equinox, MLPs alone",
    ("examples_memory", "tunix_trainer"): "Tunix",
    ("examples_memory", "tunix_trainer, LoRA"): "Tunix with LoRA",
    ("examples_memory_large", "maxtext_train"): "MaxText",
    (
        "examples_memory_large",
        "hugging_face",
    ): "transformers in torch; with coat_jax, parameters in BF16",
}


def examples_memory() -> list[list[str]]:
    """Every example without coat_jax and with it."""
    columns = ("peak, GB", "optimizer state, GB", "ms a step")
    rows = [["", *(cell for column in columns for cell in (column, "with coat_jax"))]]
    for (file, name), words in EXAMPLES.items():
        both = [case(file, example=name, coat_jax=ours) for ours in (False, True)]
        cells = [f"{c[kind] / GB:.2f}" for kind in ("peak_bytes", "state_bytes") for c in both]
        rows.append([words, *cells, *(f"{c['ms']:.1f}" for c in both)])
    return rows


QUANTIZED = {
    "bf16": "BF16",
    "int8": "INT8",
    "int8:static": "INT8, static activations",
    "int8:none": "INT8, weights alone",
    "fp8": "FP8",
    "fp8:static": "FP8, static activations",
    "fp8:none": "FP8, weights alone",
}


def rates(model: str, name: str) -> list[float]:
    """Tokens a second of a case of quantized_generation: prompts of one and of 16 texts, and then
    what is generated after them.
    """
    batches = case("quantized_generation", model=model, case=name)["batches"]
    return [
        batch[f"{part}_tokens_per_second"] for part in ("prefill", "decode") for batch in batches
    ]


def times_as_fast(model: str, name: str) -> list[float]:
    """The same over the rates in BF16."""
    both = zip(rates(model, name), rates(model, "bf16"), strict=True)
    return [ours / bf16 for ours, bf16 in both]


def quantized_generation() -> list[list[str]]:
    """What Llama-2-7B takes in 8 bits, and how many times as fast as in BF16 it generates."""
    texts = ("1 text", "16 texts")
    columns = [f"{part}, {many}" for part in ("prompts", "generating") for many in texts]
    rows = [["", "parameters, GB", *columns]]
    for name, words in QUANTIZED.items():
        size = case("quantized_generation", model="llama2_7b", case=name)["parameters"]
        faster = times_as_fast("llama2_7b", name)
        rows.append([words, f"{size / GB:.1f}", *(f"{times:.2f}" for times in faster)])
    return rows


def small_model_in_8_bits() -> list[float]:
    """How many times as fast as in BF16 llama_124m reads one prompt, and generates for 16 texts, at
    least and at most.
    """
    times = [times_as_fast("llama_124m", name) for name in QUANTIZED if name != "bf16"]
    prompt, _, _, generating = zip(*times, strict=True)
    return [extreme(column) for column in (prompt, generating) for extreme in (min, max)]


def defaults() -> list[list[str]]:
    """The defaults of the trainer's config that a reader of a loss curve asks for."""
    optimizer = ("learning_rate", "schedule", "final_ratio", "warmup_steps", "b1", "b2")
    shown = {
        "optimizer": (OptimizerConfig(), (*optimizer, "weight_decay", "clip_norm")),
        "evaluation": (EvaluationConfig(), ("every", "batches")),
        "checkpoint": (CheckpointConfig(), ("every", "keep")),
    }
    rows = [["field", "default"]]
    for part, (config, names) in shown.items():
        rows += [[f"`{part}.{name}`", f"{getattr(config, name)}"] for name in names]
    return rows


def released_memory() -> list[list[str]]:
    """The peak of a step with its gradients kept and released, by batch."""
    figures = of("released_memory")
    rows = [["sequences", "activations, GB", "peak, GB", "peak with released gradients, GB"]]
    for kept, released in zip(figures["kept"], figures["released"], strict=True):
        sizes = kept["activations"], kept["peak"], released["peak"]
        batch = f"{kept['batch']} x {kept['sequence']}"
        rows.append([batch, *(f"{size / GB:.1f}" for size in sizes)])
    return rows


def recipe() -> list[list[str]]:
    """What Llama-2-7B takes of each of several GPUs, and how fast it trains."""
    measured = {1: training("COAT", 16), **{gpus: together(gpus) for gpus in (2, 4)}}
    rows = [["GPUs", "8 sequences each, GB", "16 sequences each, GB", "tokens/s with 16 each"]]
    for gpus in (1, 2, 4, 8):
        few = case("recipe_memory", gpus=gpus, rows=8)["peak"]
        if gpus in measured:
            many = measured[gpus]["memory"]["peak"]
            speed = f"{measured[gpus]['tokens_per_second']:,.0f}"
        else:
            many, speed = case("recipe_memory", gpus=gpus, rows=16)["peak"], "not measured"
        rows.append([f"{gpus}", f"{few / GB:.1f}", f"{many / GB:.1f}", speed])
    return rows


def gradients_of_7b() -> tuple[float]:
    """GB that all gradients of Llama-2-7B take."""
    return (of("released_memory")["kept"][0]["gradients"] / GB,)


def with_few_tokens() -> tuple[float, ...]:
    """The smallest batch, the GB of its gradients, released and not, and how much that saves."""
    kept, released = (of("released_memory")[way][0] for way in ("kept", "released"))
    gradients = (one["gradients"] / GB for one in (released, kept))
    return kept["batch"], kept["sequence"], *gradients, (kept["peak"] - released["peak"]) / GB


def apart_in_large_runs() -> tuple[float]:
    """By how many percent the loss of an example in the table differs with coat_jax, at most."""
    losses = [
        [case(file, example=name, coat_jax=ours)["loss"] for ours in (False, True)]
        for file, name in EXAMPLES
    ]
    return (100 * max(abs(ours / theirs - 1) for theirs, ours in losses),)


def cache_of_a_text() -> float:
    """GB that the keys and values of a text of Llama-2-7B take while it is generated."""
    (alone, _) = case("quantized_generation", model="llama2_7b", case="bf16")["batches"]
    return alone["cache"] / GB


PAGES = [
    Page(
        "docs/clusters.md",
        [
            Given("300 seconds", SETTING),
            Given("30 seconds", SETTING),
            Given("100 seconds", SETTING),
            Given("22.05 with two virtual nodes", SETTING),
            Given("4.1, two processes", SETTING),
        ],
    ),
    Page(
        "docs/coming_from.md",
        [
            Given("torchao 0.18, TransformerEngine 2.16, bitsandbytes 0.50 and Flax 0.12", SETTING),
        ],
    ),
    Page(
        "docs/data.md",
        [
            Given("12 MB", SETTING),
            Given("256 MiB", SETTING),
            Given("2 GiB", SETTING),
            Given("8 GiB", SETTING),
            Given("1024 bytes", SETTING),
            Given("fill more than 99 % of the positions", TESTED),  # test_packing.py
        ],
    ),
    Page("docs/evaluation.md", [Given("95 % Wilson intervals", SETTING)]),
    Page(
        "docs/examples.md",
        [
            Table("examples_memory", examples_memory),
            Sentence(
                "with and without coat_jax they differ by up to {:.1f} %", apart_in_large_runs
            ),
            Given(
                "Flax NNX took 112.3 ms without coat_jax and 96.6 ms with it, Qwix 112.4 and 98.2 "
                "ms",
                "examples_memory.json as it was measured at commit 292c46d",
            ),
            Given("MaxText needs Python 3.12.", SETTING),
            Given("at least 16,384 elements", SETTING),
            Given("safetensors before 0.8,", SETTING),
        ],
    ),
    Page("docs/generation.md", [Given("64 MB", SETTING), Given("2 GB", SETTING)]),
    Page(
        "docs/quantization.md",
        [
            Given("by default 65,536", SETTING),
            Given("the first 65,536 tokens", SETTING),
            Given("100 times as large as the others, with weights like theirs", ARITHMETIC),
            Given("is left 10 times as large", ARITHMETIC),
            Given("its weights are 100 times smaller", ARITHMETIC),
            Given("changes 8 times as much", ARITHMETIC),
            Given("change 8 times less", ARITHMETIC),
            Given("the largest element of a token on 127.5", SETTING),
            Table("quantized_generation", quantized_generation),
            Given("prompts of 1024 tokens and", SETTING),
            Given("With up to 64 tokens at a time,", SETTING),
            Sentence(
                "stays in BF16, {:.2f} GB for each text of this length",
                lambda: (cache_of_a_text(),),
            ),
            Sentence(
                "in 8 bits it reads one prompt {:.2f} to {:.2f} times as fast as in BF16, and "
                "generates for 16 texts {:.2f} to {:.2f} times as fast.",
                small_model_in_8_bits,
            ),
        ],
    ),
    Page(
        "docs/quickstart.md",
        [
            Given("You need Python 3.11, 3.12 or 3.13", SETTING),
            Given("a Llama of 0.9 million parameters", SETTING),
            Given("`llama2_7b` has 476,837 steps", ARITHMETIC),
        ],
    ),
    Page(
        "docs/training.md",
        [
            Table("defaults", defaults),
            Given("among them `b2=0.999`", PUBLISHED),
            Given("Llamas of 0.9, 124 and 360 million parameters", SETTING),
            Given("It would be 100 % if", ARITHMETIC),
            Given("2.1 bytes a parameter instead of 8", ARITHMETIC),
            Given("reduce-scatters joined up to 128 MB", SETTING),
            Sentence("whose gradients take {:.1f} GB", gradients_of_7b),
            Given("476,837 steps of 1024 sequences", ARITHMETIC),
            Given("on GPUs of 80 GB", SETTING),
            Table("recipe", recipe),
            Given("which takes 4 bytes a parameter", ARITHMETIC),
            Table("released_memory", released_memory),
            Sentence(
                "With {:.0f} x {:.0f} tokens the gradients take {:.1f} GB instead of {:.1f} GB, "
                "and the peak is {:.1f} GB lower.",
                with_few_tokens,
            ),
            Sentence(
                "a step of Llama-2-7B takes {:.1f} % longer than with the moments on the GPU; "
                "without released gradients it takes {:.0f} % longer",
                lambda: (slower("offloaded", "released", than=("released",)), slower("offloaded")),
            ),
        ],
    ),
]
