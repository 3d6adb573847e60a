"""Figures of the pages that are not results of this repository, and why each may stand there."""

from experiments.figures.pages import Given

PAPER = "quoted from the COAT paper"
OTHER_RUN = "measured by the authors in a run that wrote no results file here: the page says so"
PUBLISHED = "quoted from the publication that the page names"
SETTING = "a constant of the code, of another program, or of a published recipe"
TESTED = "asserted by a test"
ARITHMETIC = "follows from a definition on the page"

BENCHMARKS = "docs/benchmarks.md"

GIVEN = [
    Given(BENCHMARKS, "The paper reports 1.45 and 1.54 on H100s", PAPER),
    Given(BENCHMARKS, "(the paper: 1.44 to 1.57 on an H100)", PAPER),
    Given(
        BENCHMARKS,
        "TransformerEngine-JAX 2.19 was not in it: on the same layer, in another run on another "
        "H200 of the same kind, it took 21.8 to 22.0 ms with current scaling and 21.3 to 22.0 ms "
        "with delayed scaling",
        OTHER_RUN,
    ),
    Given(BENCHMARKS, "1 U is the residual stream in BF16: 2 bytes x batch x", ARITHMETIC),
    Given("docs/architecture.md", "At b2 = 0.999 a step", SETTING),
    Given("docs/architecture.md", "b1 above 0.916", ARITHMETIC),
    Given(
        "docs/architecture.md",
        "7.3 learning rates for b1 = 0.9 and b2 = 0.999, 1.2 for b2 = 0.95",
        ARITHMETIC,
    ),
    Given("docs/architecture.md", "under 16,384 elements", SETTING),
    Given("docs/architecture.md", "since JAX 0.11", SETTING),
    Given("docs/clusters.md", "300 seconds", SETTING),
    Given("docs/clusters.md", "30 seconds", SETTING),
    Given("docs/clusters.md", "100 seconds", SETTING),
    Given("docs/clusters.md", "22.05 with two virtual nodes", SETTING),
    Given("docs/clusters.md", "4.1, two processes", SETTING),
    Given("docs/examples.md", "MaxText needs Python 3.12.", SETTING),
    Given("docs/examples.md", "safetensors before 0.8,", SETTING),
    Given("docs/examples.md", "at least 16,384 elements", SETTING),
    Given("docs/coming_from.md", "torchao 0.18, TransformerEngine 2.16 and", SETTING),
    Given("docs/coming_from.md", "bitsandbytes 0.50", SETTING),
    Given("docs/data.md", "12 MB", SETTING),
    Given("docs/data.md", "256 MiB", SETTING),
    Given("docs/data.md", "2 GiB", SETTING),
    Given("docs/data.md", "1024 bytes", SETTING),
    Given("docs/data.md", "fill more than 99 % of the rows", TESTED),  # test_packing.py
    Given("docs/evaluation.md", "95 % Wilson intervals", SETTING),
    Given("docs/formats.md", "arXiv 2303.17951", PUBLISHED),
    Given("docs/generation.md", "64 MB", SETTING),
    Given("docs/generation.md", "2 GB", SETTING),
    Given("docs/ideas.md", "moments take 8 bytes a parameter in FP32", ARITHMETIC),
    Given("docs/ideas.md", "in 5 bytes a group", ARITHMETIC),
    Given("docs/ideas.md", "With b2 = 0.999", SETTING),
    Given("docs/ideas.md", "1 U is the size of the layer's input in BF16, 2 bytes x", ARITHMETIC),
    Given("docs/layers.md", "1 U is the residual stream in BF16: 2 bytes times batch", ARITHMETIC),
    Given("docs/layers.md", "saves the input of each layer only (1 U)", ARITHMETIC),
    Given("docs/loss.md", "The last 8 MB", SETTING),
    Given("docs/loss.md", "with 95 % intervals", SETTING),
    Given("docs/stability.md", "with its 95 % interval", SETTING),
    Given("docs/loss.md", "The paper reports +0.55 % for OLMo-7B after 250 billion tokens", PAPER),
    Given("docs/stability.md", "arXiv 2309.14322", PUBLISHED),
    Given("docs/stability.md", "arXiv 2501.00656", PUBLISHED),
    Given("docs/stability.md", "arXiv 2405.18710", PUBLISHED),
    Given("docs/optimizers.md", "learning rates are near 0.02", PUBLISHED),
    Given("docs/quantization.md", "the first 65,536 tokens", SETTING),
    Given("docs/quantization.md", "the largest element of a token on 127.5", SETTING),
    Given("docs/quickstart.md", "You need Python 3.11, 3.12 or 3.13", SETTING),
    Given("docs/quickstart.md", "a Llama of 0.9 million parameters", SETTING),
    Given("docs/training.md", "Llamas of 0.9, 124 and 360 million parameters", SETTING),
    Given("docs/training.md", "100 % would be", ARITHMETIC),
    Given("docs/training.md", "2.1 bytes a parameter instead of 8", ARITHMETIC),
    Given("coat_jax/configs/llama2_7b.py", "section 2.2", PUBLISHED),
    Given("coat_jax/configs/llama2_7b.py", "b2 = 0.95", PUBLISHED),
    Given("coat_jax/configs/llama_124m.py", "0.5 million tokens", PUBLISHED),
    Given("coat_jax/configs/llama_124m.py", "table 2.1", PUBLISHED),
    Given("coat_jax/configs/llama_124m.py", "50,257", PUBLISHED),
    Given("coat_jax/configs/llama_30b.py", "section 2.3", PUBLISHED),
    Given("coat_jax/configs/llama_30b.py", "b2 = 0.95", PUBLISHED),
    Given("coat_jax/configs/llama_30b.py", "1.4 trillion tokens", PUBLISHED),
    Given("coat_jax/configs/olmo_1b.py", "3.1 trillion tokens", PUBLISHED),
]
