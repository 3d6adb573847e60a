"""The figures in the docstrings of the shipped configs."""

from experiments.figures.compare import Given, Page, Sentence
from experiments.figures.measured.files import GB, of
from experiments.figures.measured.package import millions
from experiments.figures.measured.throughput import training
from experiments.figures.pages.reasons import PUBLISHED


def takes(name: str, pattern: str) -> Sentence:
    """The sentence that says how many GB of a GPU a config takes in COAT and in BF16."""
    return Sentence(
        pattern,
        lambda: [of("config_memory")[name][variant]["peak"] / GB for variant in ("COAT", "BF16")],
    )


def bytes_a_parameter(*kinds: str) -> float:
    """Bytes a parameter of llama2_7b on each of its GPUs, by config_memory."""
    memory = of("config_memory")["llama2_7b"]["COAT"]
    parameters = 1e6 * millions("llama2_7b") / memory["gpus"]
    return sum(memory[kind] for kind in kinds) / parameters


def accumulated() -> tuple[float, float, float]:
    """Bytes of llama2_7b with accumulation, those of its FP32 sums, and those without."""
    total = bytes_a_parameter("parameters", "gradients", "optimizer")
    return total, 4, total - 4


def on_one_gpu() -> list[float]:
    """GB and tokens a second of llama2_7b at a batch of 10, in COAT and in BF16."""
    cases = training("COAT", 10), training("BF16", 10)
    return [number for c in cases for number in (c["peak"] / GB, c["tokens_per_second"])]


PAGES = [
    Page(
        "coat_jax/configs/llama_tiny.py",
        [Sentence("Llama of {:.1f} million parameters", lambda: (millions("tiny"),))],
    ),
    Page(
        "coat_jax/configs/llama_124m.py",
        [
            takes("llama_124m", "takes {:.1f} GB in COAT and {:.1f} in BF16"),
            Given("0.5 million tokens", PUBLISHED),
            Given("table 2.1", PUBLISHED),
            Given("50,257", PUBLISHED),
        ],
    ),
    Page(
        "coat_jax/configs/llama_350m.py",
        [takes("llama_350m", "takes {:.1f} GB in COAT and {:.1f} in BF16")],
    ),
    Page(
        "coat_jax/configs/olmo_1b.py",
        [
            Sentence("OLMo with {:.1f} billion parameters", lambda: (millions("olmo_1b") / 1e3,)),
            takes("olmo_1b", "takes {:.1f} GB of one GPU in COAT and {:.1f} in BF16"),
            Given("3.1 trillion tokens", PUBLISHED),
        ],
    ),
    Page(
        "coat_jax/configs/llama2_7b.py",
        [
            takes("llama2_7b", "takes {:.1f} GB of each GPU in COAT and {:.1f} in BF16"),
            Sentence(
                "take {:.1f} bytes a parameter with COAT, of which {:.0f} are the FP32 sum of the "
                "gradients of several microbatches; without accumulation they take {:.1f}.",
                accumulated,
            ),
            Sentence(
                "COAT takes {:.1f} GB at a batch of 10 and trains {:,.0f} tokens a second, BF16 "
                "{:.1f} GB and {:,.0f} (",
                on_one_gpu,
            ),
            Given("section 2.2", PUBLISHED),
            Given("b2 = 0.95", PUBLISHED),
        ],
    ),
    Page(
        "coat_jax/configs/llama2_13b.py",
        [takes("llama2_13b", "takes {:.1f} GB of each GPU in COAT and {:.1f} in BF16")],
    ),
    Page(
        "coat_jax/configs/llama_30b.py",
        [
            takes("llama_30b", "takes {:.1f} GB of each GPU in COAT and {:.1f} in BF16"),
            Given("section 2.3", PUBLISHED),
            Given("b2 = 0.95", PUBLISHED),
            Given("1.4 trillion tokens", PUBLISHED),
        ],
    ),
]
