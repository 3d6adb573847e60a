"""The first steps of a run may be in BF16, whatever the precision of the steps after them."""

import dataclasses
import io

import jax
import pytest
from rich.console import Console
from train_cases import ONE, mesh_of, random_batches, small, stepper

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.training import setup
from coat_jax.training.overrides import override

CONFIG = small(
    model={"layers": 1, "scan": False, "precision": "coat"},
    optimizer={"name": "adamw"},  # which is compiled sooner, and the same in both programs
    bf16_steps=2,
    total_steps=4,
)


def programs_of(config, console=None, **how):
    console = console or Console(file=io.StringIO())
    with jax.set_mesh(mesh := mesh_of(ONE)):
        return setup.compile_steps(setup.prepare(config, mesh), console, **how)


@pytest.mark.parametrize(
    ("bf16_steps", "done", "programs"),
    [
        (2, 0, {0: (coat.BF16, "layer"), 2: (coat.COAT, None)}),
        (2, 1, {1: (coat.BF16, "layer"), 2: (coat.COAT, None)}),
        (2, 2, {2: (coat.COAT, None)}),
        (0, 0, {0: (coat.COAT, None)}),
        (4, 0, {0: (coat.BF16, "layer")}),
    ],
)
def test_the_first_steps_are_in_bf16_and_recompute_layers(bf16_steps, done, programs, monkeypatch):
    """A model's config stands in for its program."""
    monkeypatch.setattr(setup, "_compile", lambda setup, console, what: setup.config.model)
    found = programs_of(dataclasses.replace(CONFIG, bf16_steps=bf16_steps), done=done)
    assert {first: (model.precision, model.remat) for first, model in found.items()} == programs


def test_the_state_goes_from_one_program_to_the_other():
    (batch,) = random_batches(1, CONFIG)
    file = io.StringIO()
    programs, program = programs_of(CONFIG, Console(file=file, width=200)), None
    run = stepper(CONFIG)
    state, losses = run.state(), []
    with jax.set_mesh(run.mesh):
        for done in range(4):
            program = programs.pop(done, program)
            state, report = program(state, run.place(batch))
            losses.append(float(report.loss))
    assert losses == sorted(losses, reverse=True)
    assert state.step == 4
    assert "Compiled the step in " in file.getvalue()
    assert "Compiled the first 2 steps, in BF16, in " in file.getvalue()


def test_a_share_of_the_run_is_so_many_steps_and_not_more_than_all():
    config = dataclasses.replace(CONFIG, bf16_steps=0.25, total_steps=40)
    assert config.steps_in_bf16 == 10
    for given, steps in (("7", 7), ("50", 40)):
        assert override(config, ["--bf16_steps", given]).steps_in_bf16 == steps
    for steps in (-1, 1.5, True):
        with pytest.raises(UserError, match=rf"bf16_steps={steps}"):
            dataclasses.replace(CONFIG, bf16_steps=steps)


@pytest.mark.parametrize("stochastic", [True, False])
def test_a_model_that_recomputes_its_layers_does_so_at_the_start_too(stochastic):
    """Inputs of layers that it saves in FP8 are rounded as in the rest of the run."""
    precision = coat.Precision(stochastic=stochastic)
    model = dataclasses.replace(CONFIG.model, remat="layer_fp8", precision=precision)
    start = dataclasses.replace(CONFIG, model=model).bf16_phase.model
    assert start.remat == "layer_fp8"
    assert start.precision == dataclasses.replace(coat.BF16, stochastic=stochastic)
