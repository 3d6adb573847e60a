"""What a run is said to need is what it needs; and what to do where that is too much."""

import io
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from train_cases import small, stepper

from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.training.cluster.mesh import batch_parts
from coat_jax.training.report import accounting
from coat_jax.training.report.accounting import DeviceMemory, explain_out_of_memory

ROWS, SEQUENCE = 4, 32
TOKENS = ROWS * SEQUENCE


# A step whose new state takes the place of the old one, but for 10 bytes of metrics.
SIZES = SimpleNamespace(
    argument_size_in_bytes=100,
    temp_size_in_bytes=30,
    output_size_in_bytes=90,
    alias_size_in_bytes=80,
)
COMPILED = SimpleNamespace(memory_analysis=lambda: SIZES)


def account(config, sizes=(1, 1, 1), limit=None, program=None):
    """On a device with a limit, or one that does not say."""
    run = stepper(config, sizes)
    stats = None if limit is None else {"bytes_limit": limit}
    return accounting.account(
        config,
        run.abstract,
        program or run.program,
        batch_parts=batch_parts(run.mesh),
        device=SimpleNamespace(memory_stats=lambda: stats),
    )


def test_a_devices_share_is_counted():
    model = {"layers": 1, "dtype": jnp.float32, "scan": False}
    config = small(model=model, optimizer={"name": "adamw"})
    alone = account(config)
    count = models.parameters_count(config.model)
    assert alone.parameters == alone.gradients == 4 * count
    assert alone.optimizer == pytest.approx(8 * count, abs=16)  # and the number of steps
    assert alone.peak > alone.parameters + alone.gradients + alone.optimizer + alone.activations / 2
    assert alone.limit is None
    cut = account(config, (2, 2, 2), 10**6)
    assert cut.parameters == pytest.approx(alone.parameters / 4, rel=0.02)  # vectors are whole
    assert cut.optimizer == pytest.approx(alone.optimizer / 4, rel=0.02)
    assert cut.activations == pytest.approx(alone.activations / 4, rel=0.01)
    assert cut.limit == 10**6


def test_accumulated_gradients_are_in_fp32_besides():
    """And what is written in place of an argument takes nothing."""
    model = {"layers": 1, "dtype": jnp.float32}
    config = small(model=model, optimizer={"name": "adamw"}, gradient_accumulation_steps=4)
    partitioned = account(config, program=COMPILED)
    assert partitioned.gradients == 2 * partitioned.parameters
    assert partitioned.peak == 100 + 30 + 90 - 80


@pytest.mark.parametrize("tied", [False, True])
def test_released_gradients_are_those_of_the_largest_part(tied):
    """A tied embedding keeps the gradient of the head until it has its own."""
    model = {"scan": False, "tied": tied, "vocab": 64, "dtype": jnp.float32}
    config = small(model=model, optimizer={"release_gradients": True})
    released = account(config, program=COMPILED)
    _, params = models.abstract(config.model)
    layer, embedding = (
        4 * sum(leaf.size for leaf in jax.tree.leaves(part))
        for part in (params["layers"][0], params["embed"])
    )
    assert layer > embedding
    assert released.gradients == layer + (embedding if tied else 0)


def kept(**changes):
    return accounting.saved_activations(small(model=changes), ROWS)


@pytest.mark.parametrize("scan", [True, False])
def test_saved_activations_are_what_the_layers_table_says(scan):
    """In units of tokens x width: x, q, k and v with half the heads, o, x, gate, up in BF16."""
    width, units = 64, 1 + 1 + 2 * 0.5 + 1 + 1 + 2 * 2
    more = kept(layers=3, scan=scan) - kept(layers=2, scan=scan)
    statistics = 2 * 4 * TOKENS  # of two norms
    extra = more - 2 * TOKENS * width * units - statistics
    assert 0 <= extra <= 4 * TOKENS  # positions


def test_fp8_and_recomputing_save_less():
    table = [kept(layers=1, precision=p) for p in ("bf16", "coat", "coat_lean")]
    table += [kept(layers=1, precision="coat", remat=r) for r in ("layer", "layer_fp8")]
    assert table == sorted(set(table), reverse=True)


def test_casts_of_weights_are_no_activations():
    assert kept(param_dtype=jnp.float32) == kept(param_dtype=jnp.bfloat16)


def test_the_table_has_a_unit_that_fits():
    large = DeviceMemory(int(13.5e9), int(13.5e9), int(14e9), int(20e9), int(65e9), int(80e9))
    on_host = large._replace(optimizer=0, on_host=int(14e9))
    for memory, there, absent in (
        (large, ("GB", "13.50", "14.00", "20.00", "65.00", "limit", "80.00"), "host"),
        (on_host, ("host", "14.00"), "MB"),
        (DeviceMemory(1, 1, 1, 1, int(3.2e6), None), ("MB", "3.20"), "limit"),
    ):
        console = Console(width=60, file=io.StringIO())
        console.print(accounting.table(memory))
        text = console.file.getvalue()
        assert [words for words in there if words in text] == list(there)
        assert absent not in text


def test_exhausted_memory_is_explained():
    def exhaust(reason):
        with explain_out_of_memory():
            raise jax.errors.JaxRuntimeError(reason)

    with pytest.raises(
        UserError, match=r"used up \(RESOURCE_EXHAUSTED: 9 GB.\)\. What helps.*: .*--remat"
    ):
        exhaust("RESOURCE_EXHAUSTED: 9 GB.\nand a page of buffers")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        exhaust("INTERNAL: something else")
