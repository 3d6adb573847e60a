"""A Llama of 124 million parameters learns from source code, in BF16 and in COAT.

Question (the paper's figures 5 and 6): how far is the loss of COAT from that of BF16 with FP32
moments? There is one run of each, so chance is part of the answer. Both are
`coat train llama_124m`, from the same parameters, on the same batches:

    python -m experiments.training_curves --folder /tmp/curves       on a GPU
    python -m experiments.training_curves --folder /tmp/curves --steps 20 --batch 2 --sequence 64
                                                                     smoke test, anywhere

The text is the Python source and documentation on this machine: its library and installed packages,
one copy of each file. A byte-level BPE of 50,257 tokens is learnt from a part of it. What is in the
folder already is not made again: a run that was interrupted continues.

Both runs share the GPU, half its memory each, so their speed says nothing; see
training_throughput.py. The last part of the text is held out.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.command import parser_of

RUNS = {"BF16, AdamW in FP32": ":bf16", "COAT, AdamW in FP8": ""}
SUFFIXES = {".py", ".pyi", ".md", ".rst"}
SMALLEST, LARGEST = 200, 1_000_000  # bytes of a file
FOR_TOKENIZER = 60_000_000  # bytes of text
VOCABULARY, END = 50257, "<|endoftext|>"
FIELDS = {  # of the config, by this program's options
    "steps": "total_steps",
    "batch": "global_batch_size",
    "sequence": "sequence_length",
    "accumulation": "gradient_accumulation_steps",
}
LAST = 50  # steps whose mean is the final loss


def main() -> None:
    """Makes what is missing, trains both, and writes losses and picture."""
    parser = parser_of(__doc__, draws=True)
    parser.add_argument("--folder", type=Path, required=True, help="for text, tokens and runs")
    parser.add_argument("--steps", type=int, default=2250, help="of training")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--accumulation", type=int, default=2, help="microbatches of a batch")
    parser.add_argument("--text", type=int, default=600, help="megabytes of text at most")
    parser.add_argument("--seconds", type=int, help="stop, save, and leave the rest for later")
    options = parser.parse_args()
    if not options.draw:
        options.folder.mkdir(parents=True, exist_ok=True)
        tokens = prepare(options.folder, options.text * 1_000_000)
        if train(options, tokens):
            print("Stopped. Run the same command to continue.")
            return
        write(options, tokens)
    draw(options.out)


def prepare(folder: Path, limit: int) -> Path:
    """The folder of token files."""
    texts, tokenizer, tokens = (folder / name for name in ("text", "tokenizer.json", "tokens"))
    if not texts.exists():
        unfinished = folder / "text.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        total = 0
        for number, text in enumerate(_documents()):
            total += len(text)
            if total > limit:
                break
            with (unfinished / f"{number % 16:02}.jsonl").open("a") as file:
                file.write(json.dumps({"text": text}) + "\n")
        unfinished.rename(texts)
        print(f"{total / 1e6:.0f} MB of text in {number:,} files", flush=True)
    if not tokenizer.exists():
        _learn_tokenizer(texts, tokenizer)
    if not tokens.exists():
        command = [sys.executable, "-m", "coat_jax", "tokenize", f"{texts}/*.jsonl"]
        subprocess.run([*command, "--tokenizer", str(tokenizer), "--out", str(tokens)], check=True)
    return tokens


def _documents() -> Iterator[str]:
    """The text of every source file below the library and the packages, each text once."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    roots |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    seen = set()
    paths = sorted({p for root in roots for p in Path(root).rglob("*") if p.suffix in SUFFIXES})
    # Neighbours are alike: files are shuffled by name, so that held-out ones are like the rest.
    for path in sorted(paths, key=lambda p: hashlib.sha256(str(p).encode()).digest()):
        try:
            if not SMALLEST <= path.stat().st_size <= LARGEST:
                continue
            data = path.read_bytes()
            text = data.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(data).digest()
        if digest not in seen:
            seen.add(digest)
            yield text


def _learn_tokenizer(texts: Path, path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def some() -> Iterator[str]:
        left = FOR_TOKENIZER
        for file in sorted(texts.glob("*.jsonl")):
            for line in file.open():
                text = json.loads(line)["text"]
                left -= len(text)
                if left < 0:
                    return
                yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(some(), trainer)
    tokenizer.save(str(path))


def train(options: argparse.Namespace, tokens: Path) -> bool:
    """Runs both at the same time; returns whether one of them was stopped before its end."""
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.46"}
    runs = []
    for variant in RUNS.values():
        command = [sys.executable, "-m", "coat_jax", "train", f"llama_124m{variant}"]
        command += ["--train", f"{tokens}/*.npy", "--out", str(_run(options.folder, variant))]
        for option, field in FIELDS.items():
            command += [f"--{field}", str(getattr(options, option))]
        command += [
            "--warmup_steps",
            "0.05",
            "--evaluation.every",
            str(max(options.steps // 10, 1)),
        ]
        command += ["--checkpoint.every", str(max(options.steps // 4, 1)), "--checkpoint.keep", "1"]
        runs.append(subprocess.Popen(command, env=os.environ | memory))
    for run in runs:
        try:
            run.wait(options.seconds)
        except subprocess.TimeoutExpired:
            for other in runs:
                other.terminate()  # the trainer saves, and says so with code 143
    codes = [run.wait() for run in runs]
    if failed := [code for code in codes if code not in (0, 143)]:
        raise SystemExit(f"coat train ended with code {failed[0]}.")
    return 143 in codes


def _run(folder: Path, variant: str) -> Path:
    return folder / (variant.removeprefix(":") or "coat")


def write(options: argparse.Namespace, tokens: Path) -> None:
    """The losses of both runs, every few steps, and what they ran on."""
    from experiments import records

    curves: dict[str, Any] = {}
    for name, variant in RUNS.items():
        lines = (_run(options.folder, variant) / "metrics.jsonl").read_text().splitlines()
        every = [json.loads(line) for line in lines]
        losses = {r["step"]: r["loss"] for r in every if "loss" in r}
        held_out = {r["step"]: r["held_out_loss"] for r in every if "held_out_loss" in r}
        means = _means(list(losses.values()))
        curves[name] = {
            "loss": means,
            "held out": held_out,
            "final": means[max(means)],
            "skipped": max(r.get("skipped", 0) for r in every),
        }
    notes = json.loads(next(tokens.glob("*.json")).read_text())
    settings = {key: getattr(options, key) for key in ("steps", "batch", "sequence")}
    settings["tokens of text"] = notes["tokens"]
    path = options.out / "training_curves.json"
    records.write(path, {"settings": settings, "curves": curves}, of_all_code=True)
    base, ours = (curves[name] for name in RUNS)
    last = max(base["held out"])
    print(
        f"final loss {base['final']:.4f} and {ours['final']:.4f} "
        f"({ours['final'] / base['final'] - 1:+.2%}), held out {base['held out'][last]:.4f} and "
        f"{ours['held out'][last]:.4f} ({ours['held out'][last] / base['held out'][last] - 1:+.2%})"
    )


def _means(losses: list[float]) -> dict[int, float]:
    """The mean over the `LAST` steps up to a step, for two hundred steps or so."""
    every = max(len(losses) // 200, 1)
    ends = [*range(every, len(losses), every), len(losses)]
    return {end: float(np.mean(losses[max(end - LAST, 0) : end])) for end in ends}


def draw(folder: Path) -> None:
    """Both curves, and the distance of one to the other."""
    import matplotlib.pyplot as plt

    from experiments import records

    figures = records.read(folder / "training_curves.json")
    curves, settings = figures["curves"], figures["settings"]
    tokens = settings["batch"] * settings["sequence"] / 1e6
    with plt.rc_context(records.CHART):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1.6, 1))
        looks = ((records.PALE, 4.0), (records.ACCENT, 1.4))
        for (name, curve), (color, width) in zip(curves.items(), looks, strict=True):
            steps = np.array([int(step) for step in curve["loss"]])
            values = np.array(list(curve["loss"].values()))
            left.plot(
                steps * tokens, values, color=color, lw=width, label=f"{name}: {curve['final']:.3f}"
            )
            held = np.array([(int(s), v) for s, v in curve["held out"].items()])
            left.plot(held[:, 0] * tokens, held[:, 1], "o", ms=4, color=color)
        base, ours = (np.array(list(curve["loss"].values())) for curve in curves.values())
        right.plot(steps * tokens, 100 * (ours / base - 1), color=records.ACCENT, lw=1.4)
        right.axhline(0, color=records.INK, lw=0.8)
        left.set_title(f"training loss, mean of {LAST} steps; dots: held out")
        right.set_title("COAT above BF16, %")
        left.set_ylim(0.95 * min(base.min(), ours.min()), float(np.quantile(base, 0.97)))
        left.legend()
        for axes in (left, right):
            axes.set_xlabel("million tokens")
        figure.suptitle("Llama, 124 million parameters, on source code")
        figure.savefig(folder / "training_curves.png")


if __name__ == "__main__":
    main()
