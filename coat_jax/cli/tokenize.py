"""Turn text into files of tokens, once, so that training reads them without delay.

Text files are one document each; of .jsonl files every line is one, {"text": ...}. All cores work.
The folder appears when it is complete; a run that is interrupted leaves nothing behind.

    coat tokenize 'texts/*.txt' more.jsonl --tokenizer tokenizer.json --out tokens
    coat train llama_124m --data.train 'tokens/*.npy'
"""

import argparse
from pathlib import Path

from coat_jax.cli.output import exit_on_signals, progress_bar
from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.printable import amount, printable
from coat_jax.tokenizers import document_tokenizer
from coat_jax.training.data.paths import files_of
from coat_jax.training.data.sources import are_tokens
from coat_jax.training.data.tokenizing import write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="text files, .jsonl, patterns")
    add("--tokenizer", help="a Hugging Face tokenizer.json; without one, tokens are bytes")
    add("--out", type=Path, required=True, help="the folder to make")
    end = "the token that ends a document; by default the tokenizer's, such as <|endoftext|>"
    add("--end-of-text", type=int, help=end)


def run(options: argparse.Namespace) -> int:
    """Tokenizes, and prints a summary."""
    out = expand_user(options.out)
    paths = files_of(tuple(options.inputs))
    if are_tokens(paths):
        raise UserError(f"{paths[0]} holds tokens already: name text files or .jsonl.")
    tokenizer = document_tokenizer(options.tokenizer, options.end_of_text)
    exit_on_signals()
    with progress_bar() as bar:
        task = bar.add_task("Tokenizing", total=sum(path.stat().st_size for path in paths))
        notes = write(paths, out, tokenizer, progress=lambda size: bar.advance(task, size))
    summary = (
        f"{amount(notes['tokens'], 'token')} of {amount(notes['documents'], 'document')} as "
        f"{notes['dtype']} in {amount(len(notes['files']), 'file')}, vocabulary "
        f"{notes['vocab']:,}, end of text {notes['end_of_text']}.\n"
        f"coat train CONFIG --data.train '{out}/*.npy'"
    )
    print(printable(summary))  # rich would end with code 1 if nobody reads it
    return 0
