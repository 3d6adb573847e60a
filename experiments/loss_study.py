"""What each part of FP8 training costs in loss, and how much of that is noise.

    python -m experiments.loss_study --size 40M --seeds 0 1 2 --arms bf16 bf16_ulp coat --out DIR
    python -m experiments.loss_study --plan ...            what would run, and for how long
    python -m experiments.loss_study --list-arms           what there is
    python -m experiments.loss_study --merge FILE...       adds results to the committed file
    python -m experiments.loss_study                       the table and picture of what is there

An arm is one change to BF16 training with FP32 moments; it is trained from several seeds, side by
side with the others, on the same batches. Baselines differ from each other by rounding only and
show how large a difference means nothing. What has a row in the results is not measured again.

The text is what is on the machine, each document once, and no run reads any of it twice.
"""

import argparse
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import coat_jax as coat
from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.moments import PAPER, Storage
from experiments import loss_study_results
from experiments.loss_study_arms import Arm, Settings, Size, differences
from experiments.loss_study_measure import Call, measure, plan
from experiments.loss_study_moments import Expanded, Logarithm, Separately
from experiments.loss_study_table import show

BASE = Arm(baseline=True)
NEVER = 1 << 60  # a `min_size` that leaves every leaf in FP32
COAT_FP32 = Arm(precision=coat.COAT)
EXACT_FORWARD = replace(coat.COAT, exact_forward=True)
MOMENTS = Arm(moments=Storage())
EXPANDED = Storage(first=coat.E4M3, second=coat.E4M3)
BOTH = Arm(precision=coat.COAT, moments=Storage())

ARMS: dict[str, Arm] = {
    # Baselines: these differ by rounding only.
    "bf16": BASE,
    "bf16_ulp": replace(BASE, perturbed=True),
    "bf16_microbatches": replace(BASE, microbatches=2),
    "bf16_fused": replace(BASE, moments=Storage(min_size=NEVER)),
    # COAT and its halves.
    "coat": BOTH,
    "coat_lean": replace(BOTH, precision=coat.COAT_LEAN),
    "moments": MOMENTS,
    "activations": COAT_FP32,
    "coat_expanded": replace(BOTH, moments=EXPANDED),
    "activations_lean": replace(COAT_FP32, precision=coat.COAT_LEAN),
    "coat_exact_forward": replace(BOTH, precision=EXACT_FORWARD),
    "activations_exact_forward": replace(COAT_FP32, precision=EXACT_FORWARD),
    # Parts of the activations; "all_but" is COAT without one part.
    "products": Arm(precision=coat.FP8_LINEAR),
    "products_e4m3_gradients": Arm(precision=replace(coat.FP8_LINEAR, backward=coat.E4M3)),
    "saved": Arm(precision=replace(coat.COAT, fp8_linear=False)),
    "saved_attention": Arm(precision=replace(coat.BF16, attention_block=16)),
    "saved_64": Arm(precision=replace(coat.COAT, fp8_linear=False, block=64)),
    "e4m3_gradients": Arm(precision=replace(coat.COAT, backward=coat.E4M3)),
    # Parts of the moments.
    "first": Arm(moments=Separately(first=Expanded())),
    "second": Arm(moments=Separately(second=Expanded(stochastic=True))),
    "second_logarithm": Arm(moments=Separately(second=Logarithm())),
    "second_nearest": Arm(moments=Separately(second=Expanded())),
    "first_stochastic": Arm(moments=Separately(first=Expanded(stochastic=True))),
    "both_separately": Arm(moments=Separately(Expanded(), Expanded(stochastic=True))),
    "moments_expanded": Arm(moments=EXPANDED),
    "moments_paper": Arm(moments=PAPER),
    "moments_nearest": Arm(moments=Storage(stochastic=False)),
    "moments_64": Arm(moments=Storage(group_size=64)),
    "moments_32": Arm(moments=Storage(group_size=32)),
    "moments_first_e5m2": Arm(moments=replace(EXPANDED, first=coat.E5M2)),
    # Settings of the optimizer: arms are compared with baselines of the same settings.
    "bf16_b2_999": replace(BASE, optimizer={"b2": 0.999}),
    "bf16_b2_999_ulp": replace(BASE, optimizer={"b2": 0.999}, perturbed=True),
    "moments_b2_999": replace(MOMENTS, optimizer={"b2": 0.999}),
}

SIZES: dict[str, Size] = {
    "tiny": Size(
        models.Config(
            vocab=256, width=128, layers=2, heads=4, kv_heads=4, head_dim=32, ffn=384,
            context=64, tied=True, scan=False,
        ),
        Settings(20, 8, 64, 1, 3e-3, held_out=32),
        tokens_per_second=1e6,
    ),
    "40M": Size(
        models.Config(
            vocab=16384, width=512, layers=10, heads=8, kv_heads=8, head_dim=64, ffn=1408,
            context=1024, tied=True, scan=False,
        ),
        Settings(400, 64, 1024, 1, 1.5e-3, held_out=1024),
        tokens_per_second=0.9e6,
    ),
    "124M": Size(
        models.Config(
            vocab=50304, width=768, layers=12, heads=12, kv_heads=12, head_dim=64, ffn=2048,
            context=1024, tied=True, scan=False,
        ),
        Settings(600, 64, 1024, 2, 6e-4, held_out=1024),
        tokens_per_second=4.2e5,
    ),
    "350M": Size(
        models.Config(
            vocab=50304, width=1024, layers=24, heads=16, kv_heads=16, head_dim=64, ffn=2816,
            context=1024, tied=True, scan=False,
        ),
        Settings(300, 64, 1024, 4, 3e-4, held_out=512),
        tokens_per_second=1.6e5,
    ),
}  # fmt: skip

BASELINES = tuple(name for name, arm in ARMS.items() if arm.baseline)
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Plans, measures, merges, or shows what was measured."""
    options = _options()
    committed = RESULTS / loss_study_results.FILE
    out = options.out or RESULTS
    if options.list_arms:
        for name, arm in ARMS.items():
            print(f"{name:24}{'baseline; ' if arm.baseline else ''}{differences(arm)}")
    elif options.merge:
        rows = loss_study_results.merge(committed, options.merge)
        print(f"{committed.name} has {len(rows)} runs.")
        show(rows, RESULTS)
    elif options.size is None:
        show(loss_study_results.read([committed, out / loss_study_results.FILE]), out)
    else:
        given = {field.name: getattr(options, field.name, None) for field in fields(Settings)}
        changes = {name: value for name, value in given.items() if value is not None}
        call = Call(
            arms={name: ARMS[name] for name in options.arms},
            size_name=options.size,
            size=SIZES[options.size],
            seeds=options.seeds,
            settings=replace(SIZES[options.size].settings, **changes),
            work=options.work,
            known=committed,
            out=out / loss_study_results.FILE,
            side_by_side=options.side_by_side,
            seconds=options.minutes * 60,
            text=options.text * 1_000_000,
            text_from=options.text_from,
        )
        if options.plan:
            plan(call)
            return
        try:
            failed = measure(call)
        except UserError as error:
            sys.exit(f"error: {error}")
        show(loss_study_results.read([committed, call.out]), out)
        sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list-arms", action="store_true", help="print the arms")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="add these results")
    parser.add_argument("--plan", action="store_true", help="only print what would run")
    parser.add_argument("--size", choices=SIZES, help="of the model")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["bf16", "bf16_ulp", "coat"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, help="of a run; default: as the size says")
    parser.add_argument("--batch", type=int, help="sequences of a step; likewise")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence; likewise")
    parser.add_argument("--accumulation", type=int, help="microbatches of a batch; likewise")
    parser.add_argument("--learning-rate", type=float, help="the highest; likewise")
    parser.add_argument("--side-by-side", type=int, default=4, help="runs on each GPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it")
    parser.add_argument("--text", type=int, default=300, help="megabytes of text at most")
    parser.add_argument("--text-from", type=Path, nargs="+", help="folders; default: the machine's")
    work = Path(tempfile.gettempdir()) / "loss_study"
    parser.add_argument(
        "--work", type=Path, default=work, help="for text, compiled programs and stopped runs"
    )
    parser.add_argument("--out", type=Path, help="folder for the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
