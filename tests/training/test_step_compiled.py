"""Training steps of the shipped configs as compiled for Hopper: what they move and what they take.

Layers run in a loop, which compiles in seconds whatever their number, or there are three of them.
Even so XLA takes 10 to 30 seconds for a whole step on several GPUs.
"""

import dataclasses
import functools
import math
import re

import jax
import pytest

pytest.importorskip("jax_triton")
from hopper import can_compile_for_hopper, kernel_calls, timeline

from coat_jax.training.cluster.mesh import NAMES
from coat_jax.training.config import TelemetryConfig
from coat_jax.training.config_files import load_config
from coat_jax.training.report import telemetry
from coat_jax.training.setup import prepare
from experiments.hopper import OPTIONS, compile_step, hopper_mesh, there

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not can_compile_for_hopper(), reason="needs XLA's CUDA plugin"),
]

GB = 10**9


@pytest.fixture(autouse=True)
def hopper():
    with there():
        yield


TWO_LAYERS = {"batch": 16, "sequence": 2048, "layers": 2}
UNROLLED = {"sequence": 2048, "layers": 3, "scan": False, "remat": "layer"}


def changed(source, *, batch, sequence, accumulation=1, optimizer=None, **model):
    """A shipped config with another batch, optimizer or model."""
    config = load_config(source)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        optimizer=optimizer or config.optimizer,
        global_batch_size=batch * accumulation,
        sequence_length=sequence,
        gradient_accumulation_steps=accumulation,
    )


def optimizer(**changes):
    """That of the 7B on one GPU, changed."""
    return dataclasses.replace(load_config("llama2_7b:one_gpu").optimizer, **changes)


@functools.cache
def compiled(source, sizes, **how):
    """The program of a config's step on GPUs, and what it takes of the memory of each."""
    return compile_step(changed(source, **how), sizes)


def moved(program, collective):
    """Dtype and shape of every array that a kind of collective returns."""
    results = re.findall(rf"= (.*) {collective}(?:-start)?\(", program.as_text())
    arrays = re.findall(r"(\w+)\[([\d,]+)\]", " ".join(results))
    return {(dtype, tuple(map(int, dims.split(",")))) for dtype, dims in arrays}


def test_llama2_7b_fits_80_gb_at_two_sequences_a_gpu_and_moves_fp8():
    """As the config has it: parts of 8 sequences on 4 GPUs, gradients accumulated in FP32."""
    program, memory, state = compiled(
        "llama2_7b", (1, 4, 1), batch=8, sequence=4096, accumulation=2
    )
    assert memory.peak < 80 * GB
    total = sum(math.prod(p.shape) * p.dtype.itemsize for p in jax.tree.leaves(state.params))
    assert memory.parameters < 1.001 * total / 4
    vocabulary = 32000
    for dtype, shape in moved(program, "all-gather"):
        # The head computes in 16 bits. Of tokens there are few bytes.
        assert dtype in ("f8e4m3fn", "s32") or vocabulary in shape, (dtype, shape)
    assert ("f8e4m3fn", (4096, 11008)) in {(d, s[-2:]) for d, s in moved(program, "all-gather")}
    scattered = {shape[-2:] for _, shape in moved(program, "reduce-scatter")}
    assert {(1024, 11008), (1024, 4096)} <= scattered
    for dtype, shape in moved(program, "all-reduce"):
        assert math.prod(shape) <= 64 * 2 * 4096, (dtype, shape)  # scales of norms, all layers


def test_weights_are_not_gathered_for_the_optimizer_where_columns_would_divide_groups():
    """A quarter of 768 columns is one and a half groups of its moments."""
    program, _, _ = compiled("llama_124m", (1, 4, 1), batch=8, sequence=1024, layers=2)
    vocabulary = 50304
    gathered = moved(program, "all-gather")
    # What is left besides tokens is the embedding, which is also the head, and its moments.
    others = {d for d, shape in gathered if not {vocabulary, 4 * vocabulary} & set(shape)}
    assert others <= {"f8e4m3fn", "s32"}
    assert any(shape[-2:] == (2048, 768) for _, shape in gathered)


@pytest.mark.costly
def test_four_gpus_move_weights_in_8_bits_and_what_is_summed_in_16():
    """With INT8 forward products, the head by itself, and parameters in BF16."""
    how = {"batch": 8, "sequence": 2048, "layers": 2, "precision": "coat_int8"}
    program, _, _ = compiled("llama2_7b:one_gpu", (1, 4, 1), **how)
    text, gathered = program.as_text(), moved(program, "all-gather")
    # In INT8 for the forward pass, again in FP8 for the backward pass; between them the largest
    # element of each column.
    matrices = {(4096, 4096), (4096, 11008)}
    for dtype in ("s8", "f8e4m3fn"):
        assert matrices <= {shape[-2:] for d, shape in gathered if d == dtype}
    for dtype, shape in gathered:
        if dtype not in ("s8", "f8e4m3fn", "s32"):
            assert 32000 in shape or len(shape) == 1, (dtype, shape)
    # The head is gathered and its gradient reduced once, not in each chunk of the loss.
    results = re.findall(r"= (.*) (all-gather|reduce-scatter|all-reduce)(?:-start)?\(", text)
    of_head = [(kind, types) for types, kind in results if "4096,32000]" in types]
    assert [kind for kind, _ in of_head] == ["all-gather", "reduce-scatter"], of_head
    assert all("f32[" not in types for _, types in of_head), of_head
    # The gradient of the embedding is summed in FP32.
    assert re.findall(r"= (\w+\[[\d,]+\])\S* scatter\(", text) == ["f32[32000,1024]"]
    moves = [line for line in text.splitlines() if " all-to-all-start(" in line]
    assert moves
    assert not any("f32[" in line for line in moves), moves


@pytest.mark.costly
def test_llama2_7b_is_sharded_in_four_by_tensor_parallelism():
    """Its hidden width, 11008, is 86 times 128: no multiple of four GPUs. Nor are two key heads."""
    how = {"batch": 8, "sequence": 2048, "kv_heads": 2}
    program, memory, _ = compiled("llama2_7b", (1, 1, 4), **how)
    assert memory.peak < 30.1 * GB
    # Weights for casts, and for the optimizer with its codes, whose groups are not whole.
    for dtype, shape in moved(program, "all-gather"):
        assert dtype in ("f8e4m3fn", "bf16", "s8", "u8"), (dtype, shape)
        assert 2048 not in shape, (dtype, shape)
    assert "__cudnn$fmha" in program.as_text()


@pytest.mark.costly
@pytest.mark.parametrize(("function", "fits"), [("config", True), ("bf16", False)])
def test_llama_30b_fits_four_gpus_of_141_gb_in_coat_alone(function, fits):
    """With four sequences of 2048 tokens on each."""
    _, memory, _ = compiled(f"llama_30b:{function}", (1, 4, 1), batch=16, sequence=2048)
    assert (memory.peak < 141 * GB) == fits


def require_moments_move_beside_products(sizes):
    """Of all layers at most two are on the device; in each layer's products both ways are used."""
    used, programs = {}, {}
    for offloads in (False, True):
        # With few tokens the peak is where the gradient of the embedding is summed in FP32. XLA
        # then chooses an order in which copies to the host are waited for at once.
        released = optimizer(release_gradients=True, offload=offloads)
        how = {"batch": 4 * sizes[1], "optimizer": released, **UNROLLED}
        programs[offloads], used[offloads], _ = compiled("llama2_7b:one_gpu", sizes, **how)
    layer = 2 * 202_375_168 // sizes[1]
    assert used[True].on_host > 3 * layer
    assert used[False].peak - used[True].peak > used[True].on_host - 2.6 * layer
    memory = programs[True].memory_analysis()
    assert memory.host_alias_size_in_bytes == used[True].on_host
    order = " ".join(timeline(programs[True]))
    spans = [span for span in re.split(r"-to \w+", order) if span.count("product") > 5]
    assert len([span for span in spans if "+to host" in span and "+to device" in span]) >= 2
    assert "to host" not in " ".join(timeline(programs[False]))


@pytest.mark.costly
def test_neither_released_gradients_nor_moments_in_host_memory_take_any_of_the_device():
    """All that is left of gradients are those of the head, summed in FP32 by the loss."""
    used = {}
    for release in (False, True):
        how = {"batch": 4, "optimizer": optimizer(release_gradients=release), **UNROLLED}
        program, memory, state = compiled("llama2_7b:one_gpu", (1, 1, 1), **how)
        used[release] = program.memory_analysis()
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        assert used[release].alias_size_in_bytes >= size
    model = changed("llama2_7b:one_gpu", **how).model
    head = model.vocab * model.width
    freed = used[False].temp_size_in_bytes - used[True].temp_size_in_bytes
    assert freed > memory.gradients - (4 + 2 + 2) * head
    require_moments_move_beside_products((1, 1, 1))  # whose other program is compiled already


@pytest.mark.costly
def test_four_gpus_move_their_moments_beside_products():
    require_moments_move_beside_products((1, 4, 1))


@pytest.mark.costly
def test_a_step_copies_no_state_and_telemetry_takes_no_more_memory(monkeypatch):
    """Though a step that is not finite changes nothing, and telemetry sees what kernels round."""
    step, memory, state = compiled("llama2_7b:one_gpu", (4, 1, 1), **TWO_LAYERS)
    of_step = step.memory_analysis()
    leaves = jax.tree.leaves(state)
    assert of_step.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert of_step.temp_size_in_bytes < 1.25 * (memory.gradients + memory.activations)
    config = changed("llama2_7b:one_gpu", **TWO_LAYERS)
    config = dataclasses.replace(config, telemetry=TelemetryConfig(every=100))
    mesh = hopper_mesh((4, 1, 1, 1), NAMES)
    monkeypatch.setattr(telemetry, "compiler_options", lambda config, mesh: OPTIONS)
    _, _, _, graph, state, _ = prepare(config, mesh)
    program = telemetry.Telemetry(config, graph, state, mesh)._tensors
    # Of a layer: norms, activation, rotation and casts, forward and backward.
    assert kernel_calls(program) >= 12
    assert "callback" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 1.1 * of_step.temp_size_in_bytes
