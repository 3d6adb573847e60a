"""`coat evaluate` finds what the logits of transformers say, for texts and for questions."""

import json
import math

import numpy as np
import pytest

from coat_jax.cli import main

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

CONTEXT = 48
TEXT = b"The quick brown fox jumps over the lazy dog. " * 5
QUESTIONS = [
    {"question": f"{a} + {b} =", "choices": [str(a + b), "none of these", "7"], "answer": 0}
    for a in range(4)
    for b in range(4)
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Their model, and its folder."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    return model, folder


def log_likelihood(model, tokens, first):
    """Of the tokens from the first one on, by their logits."""
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens[:-1])])).logits[0].double()
    found = torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), list(tokens[1:])]
    return float(found[first - 1 :].sum())


def evaluate(capsys, folder, *arguments):
    assert main(["evaluate", str(folder), *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_text_is_as_likely_as_their_logits_say(theirs, tmp_path, capsys):
    model, folder = theirs
    (tmp_path / "text").write_bytes(TEXT)
    tokens, nats, scored = b"\0" + TEXT, 0.0, 1
    for start in range(0, len(tokens), CONTEXT // 2):
        window = tokens[start : start + CONTEXT + 1]
        if start + len(window) > scored:
            nats -= log_likelihood(model, window, scored - start)
            scored = start + len(window)
    (found,) = evaluate(capsys, folder, "--text", tmp_path / "text")["texts"]
    assert found["tokens"] == found["bytes"] == len(TEXT)
    # Sums of a hundred products, a dozen deep, in FP32: 1e-5 of the mean is generous.
    assert found["nats_per_token"] == pytest.approx(nats / len(TEXT), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / len(TEXT)), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(TEXT), rel=1e-5)


def test_the_answers_are_those_of_their_logits(theirs, tmp_path, capsys):
    model, folder = theirs
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    right = np.zeros(2, int)
    for line in QUESTIONS:
        before = b"\0" + line["question"].encode()
        sums = np.array(
            [
                log_likelihood(model, before + b" " + choice.encode(), len(before))
                for choice in line["choices"]
            ]
        )
        sizes = [len(choice) for choice in line["choices"]]
        right += [np.argmax(sums) == line["answer"], np.argmax(sums / sizes) == line["answer"]]
    (found,) = evaluate(capsys, folder, "--tasks", tmp_path / "tasks.jsonl")["tasks"]
    assert found["questions"] == len(QUESTIONS)
    assert found["by_sum"]["right"] == right[0]
    assert found["per_byte"]["right"] == right[1]
    assert 0 < right[0] < len(QUESTIONS)  # neither always nor never: the test can fail
