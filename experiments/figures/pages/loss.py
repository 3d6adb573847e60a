"""The figures of docs/loss.md."""

from functools import partial

from experiments import forward_formats, tradeoff
from experiments.figures.compare import Given, Page, Sentence, Table
from experiments.figures.measured import fine_tuning, loss_study
from experiments.figures.measured.files import of
from experiments.figures.measured.layers import range_in_int8
from experiments.figures.measured.loss_study import LARGER, LARGEST, LONGER, STANDARD, STUDY
from experiments.figures.pages.reasons import AIM, PAPER, SETTING
from experiments.fine_tuning import parts, show
from experiments.forward_formats import OUTLIERS, cost
from experiments.loss_study.arms import SIZES

# Arms of loss_study, in words, by table.
PARTS = {
    "moments": "8-bit moments",
    "saved": "saved activations in FP8",
    "products": "FP8 products",
    "products_e4m3_gradients": "FP8 products, gradients in E4M3",
    "inputs_rounded": "inputs of BF16 products rounded to FP8, in the forward pass alone",
    "weights_rounded": "weights of BF16 products rounded to FP8",
    "coat": "all of COAT",
    "coat_stochastic_backward": "COAT, operands of the backward pass rounded stochastically",
    "coat_centered": "COAT, inputs of products centered",
    "coat_accurate_gradients": "COAT, FP8 products of the backward pass summed in FP32",
    "coat_exact_sums": "COAT's operands rounded, products in BF16 and summed in FP32",
    "coat_after_bf16": "BF16 in the first quarter, all of COAT after it",
    "coat_lean": "all of `COAT_LEAN`",
    "coat_lean_after_bf16": "BF16 in the first quarter, all of `COAT_LEAN` after it",
    "coat_int8": "all of `COAT_INT8`: forward products in INT8",
}
PARAMS = {
    "params_24_bits": "BF16, with corrections of 8 bits",
    "params_bf16_stochastic": "BF16, rounded stochastically",
}
NEAREST = {
    "saved_nearest": "saved activations in FP8",
    "saved_rounded_forward": "saved activations in FP8, forward pass rounded",
    "activations_nearest": "FP8 products and saved activations",
    "activations_rounded_forward": "FP8 products and saved activations, forward pass rounded",
    "activations_e4m3_gradients_nearest": "FP8 products and saved activations, gradients in E4M3",
    "coat_nearest": "all of COAT",
    "coat_rounded_forward": "all of COAT, forward pass rounded (`COAT_PAPER`)",
    "moments_paper": "the paper's moments",
    "paper": "the paper's whole recipe: `COAT_PAPER` with the paper's moments",
    "coat_e4m3_gradients_nearest": "all of COAT, gradients in E4M3",
    "coat_lean_nearest": "all of `COAT_LEAN`",
}
WHEN = {
    "bf16_after_activations_nearest": "products and activations in the first quarter, BF16 after "
    "it",
    "activations_after_saved_nearest": "saved activations in the first quarter, products too after "
    "it",
    "activations_after_products_nearest": "products in the first quarter, saved activations too "
    "after it",
    "activations_after_bf16_tenth_nearest": "BF16 in the first tenth, products and activations "
    "after it",
    "activations_after_bf16_nearest": "BF16 in the first quarter, products and activations after "
    "it",
    "coat_after_bf16_nearest": "BF16 in the first quarter, all of COAT after it",
    "coat_lean_after_bf16_nearest": "BF16 in the first quarter, all of `COAT_LEAN` after it",
}
LONGER_RUNS = {
    "coat": "all of COAT",
    "coat_after_short_bf16": "BF16 in the first 100 steps, all of COAT after it",
    "coat_before_short_bf16": "all of COAT, BF16 in the last 100 steps; 8-bit moments throughout",
}
LAYERS_IN_8_BITS = {
    "muon_coat_int8": "layers in `COAT_INT8`, states in FP32",
    "muon_coat": "layers in COAT, states in FP32",
}
STANDARD_RUNS = {
    **LAYERS_IN_8_BITS,
    "muon_products": "layers in `FP8_LINEAR`: FP8 products alone; states in FP32",
    "muon_coat_lean": "layers in `COAT_LEAN`, states in FP32",
    "muon_coat_paper": "layers in `COAT_PAPER`, states in FP32",
}
LONGER_RUNS_WITH_MUON = {
    "fp8_muon": "8-bit states, BF16 products of the optimizer",
    **LAYERS_IN_8_BITS,
}
TUNED = {
    "moments": "8-bit moments",
    "products": "FP8 products (`FP8_LINEAR`)",
    "coat_int8": "all of `COAT_INT8`",
    "coat": "all of COAT",
    "coat_lean": "all of `COAT_LEAN`",
    "coat_paper": "all of `COAT_PAPER`, with COAT's moments",
    "inputs_rounded": "inputs of forward products rounded",
    "weights_rounded": "weights rounded, in the forward and the backward pass",
    "backward_rounded": "inputs and gradients rounded, in the backward pass",
}
MUON = {
    "muon_bf16_products": "BF16 products of the optimizer, states in FP32",
    "fp8_muon": "8-bit states, BF16 products of the optimizer",
    "fp8_muon_expanded": "the same, states in E4M3 with dynamic range expansion",
    **LAYERS_IN_8_BITS,
}


def table(arms: dict[str, str], *, muon: bool = False) -> list[list[str]]:
    """What arms cost in loss; those of today's code, or else of the latest that was measured."""
    training = loss_study.effects(*STUDY, muon=muon).effects
    held_out = loss_study.effects(*STUDY, muon=muon, held_out="own").effects
    rows = [["what changes", "arm", "seeds", "training loss, last 10 %", "held-out loss", "Holm p"]]
    for arm, words in arms.items():
        if arm in training:
            costs = (loss_study.cell(one) for one in (training[arm], held_out[arm]))
            holm = f"{training[arm].holm:.2g}"
            rows.append([words, f"`{arm}`", str(training[arm].seeds), *costs, holm])
    return rows


def longer_runs(
    arms: dict[str, str], runs: tuple[str, float, int] = LONGER, *, muon: bool = False
) -> list[list[str]]:
    """What arms cost in loss over more tokens, evaluated as they were trained and in BF16."""
    losses = [
        loss_study.effects(*runs, muon=muon, held_out=forward).effects
        for forward in (None, "own", "bf16")
    ]
    columns = ["training loss, last 10 %", "held-out loss", "held-out loss, evaluated in BF16"]
    rows = [["what changes", "arm", "seeds", *columns]]
    for arm, words in arms.items():
        costs = (loss_study.cell(effects[arm]) for effects in losses)
        rows.append([words, f"`{arm}`", str(losses[0][arm].seeds), *costs])
    return rows


def tuned(ways: dict[str, str], size: str = fine_tuning.MODEL) -> list[list[str]]:
    """What ways of tuning cost in loss, evaluated as they were tuned and in BF16."""
    losses = [fine_tuning.effects(forward, size).effects for forward in (None, "own", "bf16")]
    columns = ["training loss, last 10 %", "held-out loss", "held-out loss, evaluated in BF16"]
    rows = [["what changes", "way", "seeds", *columns]]
    for way, words in ways.items():
        costs = [loss_study.cell(effects[way], digits=3) for effects in losses]
        if "_rounded" in way:
            costs[1] = ""  # rounded while tuned alone, so evaluated in BF16 only
        rows.append([words, f"`{way}`", str(losses[0][way].seeds), *costs])
    return rows


def int8_forward() -> list[list[str]]:
    """What COAT and COAT_INT8 cost in loss: from scratch with two optimizers, and in tuning."""
    adamw, muon = ("coat", "coat_int8"), ("muon_coat", "muon_coat_int8")
    studies = [
        ("from scratch with AdamW", "40 M", adamw, partial(loss_study.effects, *STUDY)),
        *(
            (
                "from scratch with Muon",
                parameters,
                muon,
                partial(loss_study.effects, *study, muon=True),
            )
            for parameters, study in (("40 M", STUDY), ("124 M", LARGER), ("360 M", LARGEST))
        ),
        ("fine-tuning with AdamW", "40 M", adamw, fine_tuning.effects),
    ]
    columns = ["COAT", "`COAT_INT8`", "COAT, held out", "`COAT_INT8`, held out"]
    rows = [["training", "parameters", "seeds", "apart by rounding", *columns]]
    for training, parameters, arms, effects in studies:
        comparisons = effects(held_out=None), effects(held_out="own")
        digits = 3 if effects is fine_tuning.effects else 2
        seeds = str(comparisons[0].effects[arms[0]].seeds)
        apart = f"{100 * comparisons[0].noise.apart:.1g} %"
        costs = (loss_study.cell(one.effects[arm], digits) for one in comparisons for arm in arms)
        rows.append([training, parameters, seeds, apart, *costs])
    return rows


def forward() -> list[list[str]]:
    """What it costs to round operands of some products, of a network that is not tuned for it."""
    costs = {name: show.forward(fine_tuning.runs(), name) for name in parts.OPERANDS}
    rows = [["products", *(f"{name} rounded" for name in costs)]]
    return rows + [
        [place, *(str(of_place[place]) for of_place in costs.values())] for place in parts.PLACES
    ]


def forward_costs() -> tuple[float, ...]:
    """What the finest of the formats costs, and COAT's, each with half of its interval."""
    formats = "INT8, a scale for each row", "E4M3, one scale"
    costs = (cost(of("forward_formats"), name, "both") for name in formats)
    return tuple(100 * number for one in costs for number in one)


def balanced_cost() -> tuple[float, ...]:
    """What INT8 costs a balanced model that had the largest outliers, and half of the interval."""
    column = f"outliers of {max(OUTLIERS)}"
    found = cost(of("forward_formats"), "INT8, a scale for each row, balanced", column)
    return 100 * found.mean, 100 * found.half


def rounding() -> list[list[str]]:
    """How far gradients are from exact by rounding, over one batch and over many."""
    figures = of("saved_rounding")
    many = f"mean of {figures['batches']} batches"
    columns = [
        (how, error)
        for how in figures["found"][0]["error"]
        for error in ("of a batch", "of the mean")
    ]
    names = (f"{how}, {'one batch' if error == 'of a batch' else many}" for how, error in columns)
    rows = [["step", "in common", *names]]
    for one in figures["found"]:
        shares = one["in common"]
        errors = (f"{100 * one['error'][how][error]:.1f} %" for how, error in columns)
        rows.append([str(one["step"]), f"{100 * sum(shares) / len(shares):.0f} %", *errors])
    return rows


PAGE = Page(
    "docs/loss.md",
    [
        Sentence(
            "A Llama of 40 million parameters was trained on {:.1f} million tokens of source code "
            "and documentation",
            lambda: (loss_study.million_tokens(*STUDY),),
        ),
        Given("with 95 % intervals", SETTING),
        Sentence(
            "[`fp8_muon`](#muon) costs {:+.2f} % ± {:.2f}; in",
            lambda: loss_study.cost("fp8_muon", muon=True),
        ),
        Table("loss_parts", lambda: table(PARTS)),
        Table("loss_params", lambda: table(PARAMS)),
        Sentence(
            "the training loss is {:+.2f} % ± {:.2f} with corrections and {:+.2f} % ± {:.2f} with "
            "stochastic rounding, and in the same seeds the two differ by {:.2f} % ± {:.2f}.",
            lambda: (
                *loss_study.cost("params_24_bits"),
                *loss_study.cost("params_bf16_stochastic"),
                *loss_study.cost_above("params_24_bits", "params_bf16_stochastic")[:2],
            ),
        ),
        Table("loss_nearest", lambda: table(NEAREST)),
        Table("loss_when", lambda: table(WHEN)),
        Table("saved_rounding", rounding),
        Sentence(
            "Rounded to nearest, as in the paper, they [cost](#why-rounding-to-nearest-costs) "
            "{:+.2f} % ± {:.2f}",
            lambda: loss_study.cost("saved_nearest"),
        ),
        Sentence(
            "with BF16 products ends {:+.2f} % ± {:.2f} above one whose activations were rounded "
            "stochastically, and COAT {:+.2f} % ± {:.2f}",
            lambda: (
                *loss_study.cost_above("saved", "saved_nearest")[:2],
                *loss_study.cost_above("coat", "coat_nearest")[:2],
            ),
        ),
        Sentence(
            "FP8 products cost about {:.1f} %: COAT ends {:+.2f} % ± {:.2f} above BF16 over "
            "{:.0f} seeds",
            lambda: (
                round(loss_study.cost("coat")[0], 1),
                *loss_study.cost("coat"),
                loss_study.seeds("coat"),
            ),
        ),
        Sentence(
            "{:.0f} BF16 runs whose initial parameters were changed at random by 1 % end "
            "{:+.2f} % above the undisturbed ones on average, and at most {:.2f} % away",
            loss_study.shaken,
        ),
        Sentence(
            "COAT is {:+.2f} % above BF16 after 30 of 400 steps, {:+.2f} % after 80, {:+.2f} % "
            "after 100, and {:+.2f} % at the end",
            lambda: (*map(loss_study.cost_by, (30, 80, 100)), loss_study.cost("coat")[0]),
        ),
        Sentence(
            "in the same seeds ({:+.2f} % ± {:.2f} relative to COAT)",
            lambda: loss_study.cost_above("coat", "coat_stochastic_backward")[:2],
        ),
        Sentence(
            "rounding their inputs alone costs {:+.2f} % ± {:.2f}, and rounding their weights "
            "alone {:+.2f} % ± {:.2f}",
            lambda: (*loss_study.cost("inputs_rounded"), *loss_study.cost("weights_rounded")),
        ),
        Sentence(
            "the loss was that of COAT: it differed by {:+.2f} % ± {:.2f} in the same seeds",
            lambda: loss_study.cost_above("coat", "coat_centered")[:2],
        ),
        Sentence(
            "single runs of all arms end between {:.1f} % below BF16 and {:.1f} % above it",
            loss_study.extremes,
        ),
        Sentence(
            "with sums in FP32 it is {:+.2f} % ± {:.2f}.",
            lambda: loss_study.cost("coat_exact_sums"),
        ),
        Sentence(
            "the loss differs from COAT's by {:+.2f} % ± {:.2f} in the same seeds; if the "
            "operands are rounded as in COAT, but multiplied in BF16 and summed in FP32, by "
            "{:+.2f} % ± {:.2f}",
            lambda: (
                *loss_study.cost_above("coat", "coat_accurate_gradients")[:2],
                *loss_study.cost_above("coat", "coat_exact_sums")[:2],
            ),
        ),
        Sentence(
            "COAT ends between {:.2f} % and {:.2f} % above BF16 in each of 8 seeds; in FP8 from "
            "the first step on, between {:.2f} % and {:.2f} % above it",
            lambda: (*loss_study.range_of("coat_after_bf16"), *loss_study.range_of("coat")),
        ),
        Sentence(
            "(`--bf16_steps 0.25`), COAT ends {:+.2f} % ± {:.2f} above BF16, and about the same in "
            "every seed; `COAT_LEAN` ends {:+.2f} % ± {:.2f} above it, over {:d} seeds.",
            lambda: (
                *loss_study.cost("coat_after_bf16"),
                *loss_study.cost("coat_lean_after_bf16"),
                loss_study.seeds("coat_lean_after_bf16"),
            ),
        ),
        Sentence(
            "the loss of COAT, rounded to nearest, then differs by {:+.2f} % ± {:.2f} from that of "
            "a run in FP8 from the first step on",
            lambda: loss_study.cost_above("coat_nearest", "coat_after_bf16_nearest")[:2],
        ),
        Sentence(
            "(`COAT_PAPER`) ends {:+.2f} % ± {:.2f} above training with an exact one, over {:.0f} "
            "seeds",
            lambda: loss_study.cost_above("activations_nearest", "activations_rounded_forward"),
        ),
        Sentence(
            "trained with the exact forward pass have a held-out loss {:.2f} % higher if they are "
            "evaluated",
            lambda: (loss_study.cost_of_evaluating_rounded(),),
        ),
        Sentence(
            "differ only in rounding end {:.3f} % apart (standard deviation). This is the noise "
            "floor: a mean over four seeds that is within {:.3f} % of zero",
            lambda: (loss_study.floor(), loss_study.band()),
        ),
        Table("loss_longer", partial(longer_runs, LONGER_RUNS)),
        Table("loss_longer_muon", partial(longer_runs, LONGER_RUNS_WITH_MUON, muon=True)),
        Sentence(
            "leave COAT {:+.2f} % ± {:.2f} above BF16. Most of this gap comes from the FP8 "
            "forward pass, not from what training lost: evaluated in BF16, the same weights have a "
            "held-out loss {:+.2f} % ± {:.2f} above that of BF16 training.",
            loss_study.cost_of_longer_runs,
        ),
        Sentence(
            "end {:.3f} % apart (standard deviation), while two 8-bit runs of one seed on "
            "different GPUs end up to {:.2f} % apart in held-out loss",
            lambda: (
                loss_study.floor_of_longer_runs_with_muon(),
                loss_study.repeated_longer_runs_with_muon(),
            ),
        ),
        Sentence(
            "(in the shorter runs {:+.2f} % ± {:.2f} in COAT, {:+.2f} % ± {:.2f} in `COAT_INT8`)",
            lambda: (
                *loss_study.cost("muon_coat", muon=True),
                *loss_study.cost("muon_coat_int8", muon=True),
            ),
        ),
        Sentence(
            "ends between {:+.2f} % and {:+.2f} % above `optax.contrib.muon`, depending on",
            lambda: (
                min(loss_study.cost_of_muon_by_seed(*LONGER)),
                max(loss_study.cost_of_muon_by_seed(*LONGER)),
            ),
        ),
        Sentence(
            "(#longer-runs) it costs {:+.2f} % ± {:.2f}",
            loss_study.cost_of_muon_in_longer_runs,
        ),
        Sentence(
            "in the shorter runs it ended {:+.2f} % to {:+.2f} % above it with each of three seeds",
            lambda: (
                min(loss_study.cost_of_muon_by_seed(*STUDY)),
                max(loss_study.cost_of_muon_by_seed(*STUDY)),
            ),
        ),
        Sentence(
            "The same model reads {:.1f} million tokens in {:,d} steps",
            lambda: (loss_study.million_tokens(*LONGER), LONGER[-1]),
        ),
        Sentence(
            "in FP8 instead of BF16 adds {:.2f} %. In the shorter runs, whose models have learnt "
            "less, it added {:.2f} %",
            lambda: tuple(loss_study.cost_of_forward(*runs) for runs in (LONGER, STUDY)),
        ),
        Sentence(
            "COAT then ends {:+.2f} % ± {:.2f} above BF16, and is {:+.2f} % above it after 600 "
            "steps.",
            lambda: (
                *loss_study.percent(loss_study.effects(*LONGER).effects["coat_after_short_bf16"]),
                loss_study.cost_by(600, "coat_after_short_bf16", LONGER),
            ),
        ),
        Table("fine_tuning", lambda: tuned(TUNED)),
        Table("fine_tuning_forward", forward),
        Table("forward_formats", lambda: forward_formats.table(of("forward_formats"))),
        Table(
            "forward_format_outliers",
            lambda: forward_formats.outlier_table(of("forward_formats")),
        ),
        Sentence(
            "INT8 then costs {:+.3f} % ± {:.3f} where they are 100 times as large",
            balanced_cost,
        ),
        Table("int8_forward", int8_forward),
        Sentence(
            "ends {:+.2f} % ± {:.2f} above BF16, and {:+.2f} % ± {:.2f} in held-out loss. With "
            "Muon, where runs that differ only in rounding end almost alike, it ends {:+.2f} % "
            "± {:.2f} above BF16 and COAT {:+.2f} % ± {:.2f}; larger models show about the same "
            "gap. In fine-tuning it costs {:+.3f} % ± {:.3f}.",
            lambda: (
                *loss_study.cost("coat_int8"),
                *loss_study.cost("coat_int8", held_out="own"),
                *loss_study.cost("muon_coat_int8", muon=True),
                *loss_study.cost("muon_coat", muon=True),
                *fine_tuning.cost("coat_int8"),
            ),
        ),
        Sentence(
            "differs from that of COAT in the same seeds by {:+.2f} % ± {:.2f} with AdamW, which "
            "may be chance, and by {:+.2f} % ± {:.2f} with Muon.",
            lambda: (
                *loss_study.cost_above("coat", "coat_int8")[:2],
                *loss_study.cost_above("muon_coat", "muon_coat_int8", muon=True)[:2],
            ),
        ),
        Sentence(
            "shows the same order: COAT costs {:+.3f} % ± {:.3f}, and `COAT_INT8` {:+.3f} % ± "
            "{:.3f}.",
            lambda: (
                *fine_tuning.cost("coat", size=fine_tuning.SMALL_MODEL),
                *fine_tuning.cost("coat_int8", size=fine_tuning.SMALL_MODEL),
            ),
        ),
        Given("For a Llama of 0.9 million parameters", SETTING),
        Sentence(
            "With a scale for each row, INT8 costs {:+.3f} % ± {:.3f}, where FP8 with one scale "
            "costs {:+.3f} % ± {:.3f}.",
            forward_costs,
        ),
        Sentence(
            "shows the cost most clearly: COAT costs {:+.3f} % ± {:.3f}, all of it in the forward "
            "products. Evaluated in BF16, the weights that COAT has tuned are {:+.3f} % ± {:.3f} "
            "above those tuned in BF16.",
            lambda: (*fine_tuning.cost("coat"), *fine_tuning.cost("coat", "bf16")),
        ),
        Sentence(
            "The same model is trained in BF16 on {:.1f} million tokens.",
            lambda: fine_tuning.million_tokens()[:1],
        ),
        Sentence(
            "are tuned on {:.1f} million tokens of prose",
            lambda: fine_tuning.million_tokens()[1:],
        ),
        Sentence(
            "Tuning in BF16 lowers the held-out loss of prose by {:.2f} %",
            lambda: (fine_tuning.gain(),),
        ),
        Sentence(
            "differ only in rounding end {:.4f} % apart. The table shows losses",
            lambda: (fine_tuning.floor(),),
        ),
        Sentence(
            "a model tuned with rounded weights is {:+.3f} % above one tuned without",
            lambda: fine_tuning.cost("weights_rounded", "bf16")[:1],
        ),
        Sentence(
            "At 124 million parameters, {:.1f} million tokens",
            lambda: (loss_study.million_tokens(*LARGER),),
        ),
        Table("loss_study_124m", loss_study.larger_seeds),
        Sentence(
            "learning rate of 6e-4, COAT ends {:+.2f} % ± {:.2f} above BF16",
            lambda: loss_study.larger("coat"),
        ),
        Sentence(
            "with rounding to nearest it ended {:+.2f} % ± {:.2f} above",
            lambda: loss_study.larger("coat_nearest"),
        ),
        Sentence(
            "and {:+.2f} % ± {:.2f} if the first quarter was in BF16 as well.",
            lambda: loss_study.larger("coat_after_bf16_nearest"),
        ),
        Sentence("may end {:.2f} % apart by rounding alone", loss_study.larger_apart),
        Sentence(
            "costs {:.2f} % ± {:.2f} less than COAT at 124 million parameters, and {:.2f} % less",
            lambda: (
                *loss_study.saved_by_int8(*LARGER),
                loss_study.saved_by_int8(*LARGEST)[0],
            ),
        ),
        Sentence(
            "of 124 million reads {:.1f} million tokens, and a model of 360 million parameters "
            "reads {:.1f} million",
            lambda: tuple(
                loss_study.million_tokens(*runs, muon=True) for runs in (LARGER, LARGEST)
            ),
        ),
        Sentence(
            "no chaotic start: two baselines that differ only in rounding end {:.4f} % apart",
            lambda: (100 * loss_study.effects(*STUDY, muon=True).noise.apart,),
        ),
        Sentence(
            "`fp8_muon` cost {:+.2f} % ± {:.2f} in training loss, and {:+.2f} % ± {:.2f} held out",
            loss_study.cost_of_muon,
        ),
        Sentence(
            "and it cost twice as much, {:+.2f} % ± {:.2f}.",
            loss_study.cost_of_muon_before,
        ),
        Sentence(
            "half of it comes from products in BF16, which cost {:+.2f} % ± {:.2f} with states in "
            "FP32",
            lambda: loss_study.cost("muon_bf16_products", muon=True),
        ),
        Sentence(
            "(`fp8_muon_expanded`), two seeds cost {:+.2f} % ± {:.2f}",
            lambda: loss_study.cost("fp8_muon_expanded", muon=True),
        ),
        Table("loss_study_muon", lambda: table(MUON, muon=True)),
        Sentence(
            "A layer of Llama-2-7B takes {:.1f} to {:.1f} % longer in `COAT_INT8` than in COAT",
            range_in_int8,
        ),
        Sentence("a layer takes {:.1f} to {:.1f} % longer.", range_in_int8),
        Sentence(
            "a layer of Llama-2-7B takes {:.1f} to {:.1f} % longer than in COAT", range_in_int8
        ),
        Sentence(
            "these runs trained for {:.0f} s instead of {:.0f} s",
            lambda: loss_study.seconds_of_training("muon_coat_int8", "muon_coat"),
        ),
        Sentence(
            "they cost {:+.2f} % ± {:.2f} by themselves",
            lambda: loss_study.cost("fp8_muon", muon=True),
        ),
        Given("the whole interval is above 0.15 %", AIM),
        Given("the first mean is slightly above 0.15 %", AIM),
        Given("at most 3 % more time", AIM),
        Given("the first three take more than 3 % longer", AIM),
        Table("tradeoff", lambda: tradeoff.table(tradeoff.ways())),
        Sentence(
            "ends [{:+.2f} % ± {:.2f}](#the-papers-recipe) above BF16",
            lambda: loss_study.cost("paper"),
        ),
        Sentence(
            "ends {:+.2f} % ± {:.2f} above BF16 over {:.0f} seeds. With coat_jax's moments the "
            "same layers end {:+.2f} % ± {:.2f} above it: in the same seeds the paper's moments "
            "are {:.2f} % ± {:.2f} lower in loss. With BF16 layers they end {:.2f} % ± {:.2f} "
            "below FP32 moments, where coat_jax's end {:+.2f} % ± {:.2f} above.",
            lambda: (
                *loss_study.cost("paper"),
                loss_study.seeds("paper"),
                *loss_study.cost("coat_rounded_forward"),
                *loss_study.cost_above("paper", "coat_rounded_forward")[:2],
                *loss_study.below("moments_paper"),
                *loss_study.cost("moments"),
            ),
        ),
        Given("at most 0.15 % above that of BF16 with FP32 moments (in `COAT_LEAN` 0.25 %)", AIM),
        Table("loss_standard", partial(longer_runs, STANDARD_RUNS, STANDARD, muon=True)),
        Sentence(
            "of 124 million parameters, trained on {:.1f} million tokens with Muon, whose states "
            "are in FP32, ends {:+.2f} % ± {:.2f} above BF16 in COAT and {:+.2f} % ± {:.2f} in "
            "`COAT_INT8`. After {:.1f} million tokens",
            lambda: (
                loss_study.million_tokens(*STANDARD, muon=True),
                *loss_study.with_muon(*STANDARD)[:4],
                loss_study.million_tokens(*LARGER),
            ),
        ),
        Sentence(
            "and for {:,d} steps from three. These longer runs read {:.1f} million tokens",
            lambda: (STANDARD[-1], loss_study.million_tokens(*STANDARD, muon=True)),
        ),
        Sentence(
            "Muon](#with-muon) {:.2f} % ± {:.2f} more than FP8 products alone.",
            lambda: loss_study.above("muon_products", "muon_coat"),
        ),
        Sentence(
            "`COAT_LEAN` ends {:+.2f} % ± {:.2f} above COAT in the same seeds: it",
            lambda: loss_study.above("muon_coat", "muon_coat_lean"),
        ),
        Sentence(
            "rounded activations, ends {:+.2f} % ± {:.2f} above COAT.",
            lambda: loss_study.above("muon_coat", "muon_coat_paper"),
        ),
        Sentence(
            "forward products in INT8 (`COAT_INT8`), COAT costs {:.2f} % ± {:.2f} less.",
            lambda: loss_study.above("muon_coat_int8", "muon_coat"),
        ),
        Sentence(
            "raises the held-out loss by {:.2f} % ± {:.2f} in COAT, {:.2f} % ± {:.2f} in "
            "`COAT_INT8`, {:.2f} % ± {:.2f} in `COAT_LEAN` and {:.2f} % ± {:.2f} in `COAT_PAPER`.",
            lambda: loss_study.of_evaluation(
                "muon_coat", "muon_coat_int8", "muon_coat_lean", "muon_coat_paper"
            ),
        ),
        Sentence(
            "FP8 products alone (`FP8_LINEAR`) cost {:+.2f} % ± {:.2f}, and COAT, which also saves "
            "activations in FP8, ends {:.2f} % ± {:.2f} above them in the same seeds.",
            lambda: (
                *loss_study.in_standard_run("muon_products"),
                *loss_study.above("muon_products", "muon_coat"),
            ),
        ),
        Sentence(
            "limit is 0.25 %, with {:+.2f} % ± {:.2f} in training loss and {:+.2f} % ± {:.2f} held "
            "out.",
            lambda: (
                *loss_study.in_standard_run("muon_coat_lean"),
                *loss_study.in_standard_run("muon_coat_lean", held_out="own"),
            ),
        ),
        Sentence(
            "products alone cost {:+.2f} % ± {:.2f} of the {:+.2f} % ± {:.2f}",
            lambda: loss_study.in_standard_run("muon_products", "muon_coat"),
        ),
        Sentence(
            "It is {:+.2f} % ± {:.2f} in COAT and {:+.2f} % ± {:.2f} in `COAT_INT8` after a whole "
            "run of {:.1f} million tokens, and {:+.2f} % ± {:.2f} and {:+.2f} % ± {:.2f} after one "
            "of {:.1f} million.",
            lambda: (
                *loss_study.with_muon(*LARGER)[:4],
                loss_study.million_tokens(*LARGER),
                *loss_study.with_muon(*STANDARD)[:4],
                loss_study.million_tokens(*STANDARD, muon=True),
            ),
        ),
        Sentence(
            "evaluated in BF16, the weights trained in COAT are still {:+.2f} % ± {:.2f} above "
            "those trained in BF16, and those of `COAT_INT8` {:+.2f} % ± {:.2f}.",
            lambda: loss_study.with_muon(*STANDARD, held_out="bf16")[:4],
        ),
        Sentence(
            "it is {:+.2f} % after {:.0f} million tokens, {:+.2f} % after {:.0f} million, and "
            "grows slowly from there to the end. (These two are means over the {:.0f} million "
            "tokens before.)",
            lambda: [
                *(
                    figure
                    for step in (640, 1200)
                    for figure in (
                        loss_study.cost_by(step, "muon_coat", STANDARD, muon=True),
                        loss_study.million_tokens(*STANDARD, muon=True, by=step),
                    )
                ),
                loss_study.million_tokens(*STANDARD, muon=True, by=STANDARD[-1] // 20),
            ],
        ),
        Sentence(
            "two of a seed that differ only in rounding end {:.3f} % apart (standard deviation). "
            "Seeds",
            lambda: (100 * loss_study.effects(*STANDARD, muon=True).noise.apart,),
        ),
        Sentence(
            "training took {:.0f} s in COAT, {:.0f} s in `COAT_INT8` and {:.0f} s in BF16",
            lambda: loss_study.seconds_of_training("muon_coat", "muon_coat_int8", "muon"),
        ),
        Sentence(
            "as narrow as these, {:d} columns wide",
            lambda: (SIZES[STANDARD[0]].model.width,),
        ),
        Sentence(
            "**Layers in COAT miss the aim**, with {:+.2f} % ± {:.2f} in training loss and "
            "{:+.2f} % ± {:.2f} held out.",
            lambda: (
                *loss_study.with_muon(*STANDARD)[:2],
                *loss_study.with_muon(*STANDARD, held_out="own")[:2],
            ),
        ),
        Sentence(
            "comes close**, with {:+.2f} % ± {:.2f} in training and {:+.2f} % ± {:.2f} held out:",
            lambda: (
                *loss_study.with_muon(*STANDARD)[2:4],
                *loss_study.with_muon(*STANDARD, held_out="own")[2:4],
            ),
        ),
        Sentence(
            "held out alone, with {:+.2f} %;",
            lambda: loss_study.cost("coat", held_out="own")[:1],
        ),
        Sentence(
            "parameters and {:.1f} million tokens with AdamW, the mean training loss is {:+.2f} % "
            "in COAT, "
            "{:+.2f} % in `COAT_INT8` and {:+.2f} % in `COAT_LEAN`. If the first quarter is in "
            "BF16, it is {:+.2f} % in COAT and {:+.2f} % in `COAT_LEAN`.",
            lambda: (
                loss_study.million_tokens(*STUDY),
                *(
                    loss_study.cost(arm)[0]
                    for arm in (
                        *("coat", "coat_int8", "coat_lean"),
                        *("coat_after_bf16", "coat_lean_after_bf16"),
                    )
                ),
            ),
        ),
        Given("with about 600 MB of distinct text", SETTING),
        Sentence(
            "The {:d} runs above take about {:.0f} minutes of one H200",
            lambda: (12, loss_study.minutes("124M", steps=STANDARD[-1], runs=12)),
        ),
        Sentence(
            "because two BF16 runs may end {:.2f} % [apart by rounding alone]",
            loss_study.larger_apart,
        ),
        Given("The paper reports +0.55 % for OLMo-7B after 250 billion tokens", PAPER),
    ],
)
