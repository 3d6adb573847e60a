"""Continue texts with a trained model: `coat generate WHERE --prompt TEXT`.

WHERE is the folder of a run, whose newest intact checkpoint is read, or of a Hugging Face model.
Prompts run in batches (--batch). The first text of a batch is printed while it is generated, the
others when the batch is finished.

  coat generate out/llama_tiny --prompt 'def main('
  coat generate Llama-3.1-8B --prompt 'Once upon a time' --temperature 0
  coat generate out/chat --prompts questions.txt --stop '<|im_end|>' --batch 16 --cache int8
  coat generate SmolVLM-256M --image street.jpg --prompt 'How many cars are there?'

The tokenizer is the tokenizer.json in WHERE, or else the one that the run was trained with. Without
either, a model with a vocabulary of 256 tokens reads bytes, and any other needs --tokenizer. The
model of a run computes in the precision that it was trained in, a Hugging Face model in the dtype
of its weights, and a quantized one in 8 or 4 bits. A text ends at the token that ends a document,
or at one of --stop.

--cache int8 stores the keys and values of past tokens in half of BF16's memory, int4 in about a
quarter. With many or long texts, most of the time of a new token goes into reading them. INT8
hardly changes what a model says. For INT4, use a model from coat convert --balance.

With --image, each prompt is a question about the pictures, and the model answers it as it was
trained to.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from coat_jax import generation
from coat_jax.cli.arguments import add_count, add_model_arguments, require_effects
from coat_jax.cli.model_folder import ModelFolder, on_devices
from coat_jax.cli.pictures import Asker, add_question_template
from coat_jax.errors import UserError
from coat_jax.files import expand_user, lines_of, parse_json, read_text, require_regular
from coat_jax.nn import MeshAxes
from coat_jax.numerics.cache_formats import CacheFormat
from coat_jax.printable import printable
from coat_jax.tokenizers import AnyTokenizer

BETWEEN = "\n---\n"
TENSOR = "tensor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_model_arguments(parser)
    add = parser.add_argument
    prompt = "a text to continue; may be repeated"
    add("--prompt", action="append", default=[], metavar="TEXT", help=prompt)
    in_jsonl = 'in a .jsonl file each is a string or {"prompt": ...}'
    add("--prompts", type=Path, metavar="FILE", help=f"a prompt per line; {in_jsonl}")
    add("--image", action="append", default=[], metavar="FILE", help="a picture; may be repeated")
    add_question_template(parser)
    add_count(parser, "--max-tokens", 256, "new tokens of a text, at most")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    add("--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest; 0: all")
    likeliest = "choose among the likeliest tokens that have probability P together"
    add("--top-p", type=float, default=1.0, metavar="P", help=likeliest)
    add("--seed", type=int, default=0, help="seed of the random numbers (default: 0)")
    stop = "a token that ends a text; may be repeated"
    add("--stop", action="append", default=[], metavar="TOKEN", help=stop)
    add_count(parser, "--batch", 8, "prompts at a time")
    cache = "how past keys and values are stored (default: in the dtype that the model computes in)"
    add("--cache", choices=get_args(CacheFormat), help=cache)
    add_count(parser, "--devices", 1, "devices that share each layer")


def run(options: argparse.Namespace) -> int:
    """Generates, and prints the speed."""
    names = "temperature", "top_k", "top_p", "seed"
    sampling = generation.Sampling(**{name: getattr(options, name) for name in names})
    texts = [*options.prompt, *_lines(options.prompts)]
    if not texts:
        raise UserError("There is no prompt: give --prompt TEXT, or lines in --prompts FILE.")
    folder = ModelFolder(options, axes=MeshAxes(tensor=TENSOR if options.devices > 1 else None))
    images = None
    if options.image:
        asker = Asker(folder, options.question_template)
        for file in map(expand_user, options.image):
            require_regular(file, "image")
        files = [expand_user(file).absolute() for file in options.image]
        asked = [asker.ask(t, files, root=Path(files[0].anchor), where="--image") for t in texts]
        prompts, images = [one.tokens for one in asked], [asker.pixels(asked[0])] * len(texts)
        texts = [f"{text}\n" for text in texts]  # the answer begins on a line of its own
    else:
        require_effects(options, [("question_template", False, "pictures (--image FILE)")])
        prompts = [folder.tokenizer.encode(text) for text in texts]
    stops = [*folder.stops, *map(folder.tokenizer.token, options.stop)]
    generation.require_prompts(folder.config, prompts, max_tokens=options.max_tokens)
    with on_devices(options.devices, TENSOR):
        model = folder.load()
        spent = np.zeros((2, 2))
        try:
            for first in range(0, len(prompts), options.batch):
                batch = slice(first, first + options.batch)
                chunks = generation.stream(
                    model,
                    prompts[batch],
                    max_tokens=options.max_tokens,
                    sampling=sampling,
                    stops=stops,
                    first=first,
                    images=images and images[batch],
                    cache=options.cache,
                )
                _say(BETWEEN if first else "")
                _print(folder.tokenizer, texts[batch], prompts[batch], _measure(chunks, spent))
        finally:  # an error begins on a line of its own
            _say("\n")
    (first_seconds, _), (seconds, tokens) = spent
    rate = f", then {tokens / seconds:,.0f} tokens/s" if seconds else ""
    until = f"{first_seconds:.1f} s until the first{rate}"
    print(f"{spent[:, 1].sum():,.0f} tokens; {until}.", file=sys.stderr)
    return 0


def _lines(file: Path | None) -> Iterator[str]:
    """Returns the prompts in a file, one on each line that is not blank."""
    if file is None:
        return
    for number, line in enumerate(lines_of(read_text(expand_user(file))), 1):
        if not line.strip():
            continue
        if file.suffix.lower() != ".jsonl":
            yield line
        else:
            record = parse_json(line, f"{file}:{number}")
            prompt = record.get("prompt") if isinstance(record, dict) else record
            if not isinstance(prompt, str):
                raise UserError(f'{file}:{number} is neither a string nor {{"prompt": "..."}}.')
            yield prompt


def _print(
    tokenizer: AnyTokenizer,
    texts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    chunks: Iterator[list[list[int]]],
) -> None:
    """Prints the first text while it is generated, and the others when their batch is complete."""
    readers = [tokenizer.reader(prompt) for prompt in prompts]
    others = list(texts[1:])
    _say(texts[0])
    for chunk in chunks:
        first, *rest = (reader.read(new) for reader, new in zip(readers, chunk, strict=True))
        _say(first)
        others = [before + new for before, new in zip(others, rest, strict=True)]
    _say(readers[0].end())
    for other, reader in zip(others, readers[1:], strict=True):
        _say(BETWEEN + other + reader.end())


def _say(text: str) -> None:
    # A model may write control characters, such as those that move a terminal's cursor.
    on_terminal = sys.stdout is not None and sys.stdout.isatty()  # None if it is closed
    print(printable(text) if on_terminal else text, end="", flush=True)


def _measure(chunks: Iterator[list[list[int]]], spent: np.ndarray) -> Iterator[list[list[int]]]:
    """Passes the chunks through, and adds up their seconds and tokens in `spent`.

    Its first row is for the first chunk, which waits for the prompts and for XLA.
    """
    last = time.perf_counter()
    for number, chunk in enumerate(chunks):
        now = time.perf_counter()
        spent[min(number, 1)] += now - last, sum(map(len, chunk))
        last = now
        yield chunk
