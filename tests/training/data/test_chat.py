"""Laws of conversations: answers are learned, questions are not."""

import numpy as np
import pytest
from data_cases import config_of, loader_of, write_lines
from tokenizer_cases import SPACED, write_spaced_tokenizer, write_tokenizer

from coat_jax.errors import UserError
from coat_jax.tokenizers import Bytes, Tokenizer
from coat_jax.training.data.chat import parts_of, read
from coat_jax.training.data.sources import TEMPLATE

HELLO = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Goodbye"},
    ]
}


ANSWER = {"role": "assistant", "content": "x"}


def text_of(tokens):
    return bytes(tokens.tolist()).decode().replace("\0", "¶")


def test_the_template_is_filled_in_and_answers_are_learned(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [HELLO, HELLO])
    documents = read([path], Bytes(), TEMPLATE)
    assert text_of(documents.tokens[: documents.ends[0]]) == (
        "<|system|>\nBe kind.¶\n<|user|>\nHi¶\n<|assistant|>\nHello¶\n<|user|>\nBye¶\n"
        "<|assistant|>\nGoodbye¶\n"
    )
    assert text_of(documents.tokens[documents.learned]) == "Hello¶Goodbye¶" * 2
    assert len(documents.ends) == 2


def test_an_answer_of_weight_0_is_read_and_not_learned(tmp_path):
    """As in OpenAI's files. What an export leaves empty says nothing."""
    system, *others = HELLO["messages"]
    weights = [{}, {"weight": 0, "refusal": None}, {"weight": 0}, {"weight": 1, "tool_calls": []}]
    messages = [system, *(one | more for one, more in zip(others, weights, strict=True))]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": messages}, HELLO])
    documents = read([path], Bytes(), TEMPLATE)
    first, second = documents.part(range(1)), documents.part(range(1, 2))
    assert np.array_equal(first.tokens, second.tokens)
    assert text_of(first.tokens[first.learned]) == "Goodbye¶"


def test_a_template_may_use_the_tokenizer_s_own_markers(tmp_path):
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    encoder = Tokenizer(write_tokenizer(tmp_path / "t.json", special=special), end_of_text=2)
    messages = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "x"}]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": messages}])
    documents = read([path], encoder, "<|im_start|>{role}\n{content}{end}\n")
    # Once per message each, although the user spells one out.
    assert documents.tokens.tolist().count(1) == 2
    assert documents.tokens.tolist().count(2) == 2


@pytest.mark.parametrize("kind", SPACED)
@pytest.mark.parametrize(
    "template",
    ["[{role}] {content}{end}", "<{role}>\n{content} {end}\n", "[{role}]{content}</s>then{end}"],
)
def test_a_tokenizer_that_puts_a_space_first_sees_the_text_of_the_template(
    kind, template, tmp_path
):
    """But where it starts anew after {end}, as it does in a prompt with this token."""
    import tokenizers

    file = write_spaced_tokenizer(tmp_path / "t.json", kind)
    path = write_lines(tmp_path / "a.jsonl", [HELLO])
    found = read([path], Tokenizer(file), template).tokens.tolist()
    library = tokenizers.Tokenizer.from_file(str(file))
    text = "".join(template.format(**message, end="</s>") for message in HELLO["messages"])
    expected = library.encode(text, add_special_tokens=False).ids
    both = (library.decode(ids, skip_special_tokens=False) for ids in (found, expected))
    assert len(set(both)) == 1


def test_conversations_are_shared_between_the_splits(tmp_path):
    answers = [f"answer {number:02}" for number in range(30)]
    records = [{"messages": [ANSWER | {"content": answer}]} for answer in answers]
    path = write_lines(tmp_path / "a.jsonl", records)
    config = config_of(path, kind="chat", held_out_part=0.1)
    found = []
    for split, count in (("train", 27), ("held_out", 3)):
        loader = loader_of(config, split, batch=4, sequence=64)
        texts = [text_of(batch.labels[batch.labels >= 0]).split("¶") for batch in loader]
        found.append([text for said in texts for text in said if text])
        assert len(found[-1]) == count
    assert sorted([*found[0], *found[1]]) == answers


NEEDED = "must have {role}, {content} and {end}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", NEEDED),
        ("{content}{role}{end}", NEEDED),
        ("{role}{role}{content}{end}", NEEDED),
        (r"<{role}>\n{content}{end}", "no backslash with an n where"),
    ],
)
def test_a_template_without_its_parts_is_refused(template, message):
    with pytest.raises(UserError, match=message):
        parts_of(template)


NOTHING = "nothing can be learned. Its keys are "
NOT_A_MESSAGE = 'a message is .* one of the roles .* perhaps "weight": 0, or 1 of the assistant'


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, rf"{NOTHING}\['text'\]"),
        ({"messages": {}}, NOTHING),
        *(
            ({"messages": [message]}, NOT_A_MESSAGE)
            for message in (
                "x",
                {"role": "user"},
                {"role": "bot", "content": "x"},
                ANSWER | {"weight": 0.5},
                ANSWER | {"role": "user", "weight": 1},
            )
        ),
        ({"messages": [{"role": "user", "content": "x"}]}, NOTHING),
        ({"messages": [ANSWER | {"weight": 0}]}, NOTHING),
        ({"messages": [ANSWER | {"content": None, "tool_calls": [1]}]}, r"has \['tool_calls'\]"),
        ({"messages": [ANSWER | {"content": "a\0b"}]}, r"A text has the character NUL.*'a\\x00b'"),
    ],
)
def test_a_line_that_is_not_a_conversation_is_refused_by_its_number(record, message, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [HELLO, record])
    with pytest.raises(ValueError, match=rf"a.jsonl:2:? .*{message}"):
        read([path], Bytes(), TEMPLATE)


def test_files_that_cannot_be_divided_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"There is no conversation in .*a\.jsonl\."):
        read([write_lines(tmp_path / "a.jsonl", [])], Bytes(), TEMPLATE)
    with pytest.raises(ValueError, match=r"train data has no token to predict in its 0 rows"):
        loader_of(config_of(write_lines(tmp_path / "a.jsonl", [HELLO]), kind="chat"), sequence=64)
    path = write_lines(tmp_path / "a.jsonl", [HELLO] * 4)
    description = loader_of(config_of(path, kind="chat"), sequence=64).description
    assert "; truncated to that length: 3 documents" in description
