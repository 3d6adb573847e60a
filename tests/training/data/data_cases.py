"""Small data for the tests: rows, token files, tokenizers."""

import json

import numpy as np

from coat_jax.training.data import DataConfig, Loader, rows_of
from coat_jax.training.data.rows import IGNORED, Windows
from coat_jax.training.data.stream import Stream

END = 0  # ends documents throughout


def windows_of(tokens, sequence, end_of_text=None, kind=Windows):
    stream = Stream({"numbers": np.asarray(tokens, np.uint16)}, 1 << 16)
    return kind(stream, range(len(tokens)), sequence=sequence, end_of_text=end_of_text)


def numbered(rows, sequence=4, **kind):
    """Rows of a stream in which the tokens are 0, 1, 2, ...: row r begins with r * sequence."""
    return windows_of(range(rows * sequence + 1), sequence, **kind)


def numbers_of(batch, sequence=4):
    """The numbers of a batch's rows, without padding."""
    real = batch.labels[:, 0] != IGNORED
    return (batch.tokens[real, 0] // sequence).tolist()


def named(*paths, **changes):
    return DataConfig(train=tuple(map(str, paths)), **changes)


def opened(config, split="train", *, batch=1, sequence=8, vocab=1000):
    rows = rows_of(config, split=split, sequence=sequence, vocab=vocab)
    return Loader(rows, batch=batch, seed=0, epochs=1)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def _train(path, tokenizer, vocab, special, alphabet=()):
    from tokenizers import trainers

    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(special),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the thing that they thought then [user]"] * 3, trainer)
    tokenizer.save(str(path))
    return path


def write_tokenizer(path, vocab=300, special=("<|endoftext|>",)):
    """A byte-level BPE tokenizer, as published ones are, with a few merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _train(path, tokenizer, vocab, special, pre_tokenizers.ByteLevel.alphabet())


def write_spaced_tokenizer(path, kind):
    """One that puts a space in front of a text, in the manner of Llama 2 ("prepend") or later."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if kind == "prepend":
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(spaces)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    spaces = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    steps = [spaces[0], decoders.ByteFallback(), decoders.Fuse(), spaces[1]]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    return _train(path, tokenizer, 310, special)


SPACED = ("prepend", "first", "always")
