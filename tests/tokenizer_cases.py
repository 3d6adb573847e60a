"""Small tokenizers of the kinds that published models have."""

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ("<s>", "</s>", "<unk>")
SPACED = ("prepend", "first", "always")


def write_tokenizer(path, vocab=300, special=("<|endoftext|>",)):
    """As GPT-2, Llama 3 and Qwen have it: a token is some bytes, perhaps not whole characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _train(path, tokenizer, vocab, special, pre_tokenizers.ByteLevel.alphabet())


def write_spaced_tokenizer(path, kind):
    """One that puts a space in front of a text, in the manner of Llama 2 ("prepend") or later.

    Characters that it does not know become bytes.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if kind == "prepend":
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(spaces)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    spaces = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    steps = [spaces[0], decoders.ByteFallback(), decoders.Fuse(), spaces[1]]
    tokenizer.decoder = decoders.Sequence(steps)
    _train(path, tokenizer, 310, [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])
    content = json.loads(path.read_text())
    content["added_tokens"] = content["added_tokens"][: len(SPECIAL)]  # bytes are ordinary tokens
    path.write_text(json.dumps(content))
    return path


def _train(path, tokenizer, vocab, special, alphabet=()):
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(special),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the thing that they thought then [user]"] * 3, trainer)
    tokenizer.save(str(path))
    return path
