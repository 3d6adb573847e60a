"""Laws of conversations with pictures: each keeps its pictures, whole and in order."""

import ast
import dataclasses
import itertools
import json
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from data_cases import write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_cases import (
    BLOCK,
    IMAGE,
    MODEL,
    answers_of,
    config_of_files,
    numbers_of,
    open_rows,
    paint,
    picture,
    talk,
    text,
    text_of,
    texts_of,
    write_talks,
)
from tokenizer_cases import write_tokenizer

from coat_jax.errors import UserError
from coat_jax.printable import amount
from coat_jax.training.data import Loader, PicturesConfig
from coat_jax.training.data.picture_rows import PictureRows
from coat_jax.training.data.pictures import read
from coat_jax.training.families import FAMILIES

LARGE = dataclasses.replace(
    MODEL, decoder=dataclasses.replace(MODEL.decoder, vocab=70_000), image_token=299
)


def rows_of_all(path, *, sequence=64, seed=0, **changes):
    """Rows of all conversations: none is held out."""
    config = config_of_files(path, **changes)
    found = read([path], config, MODEL, sequence)
    return PictureRows(found, config, MODEL, sequence=sequence, seed=seed)


def list_of(rows):
    return [rows[row] for row in range(len(rows))]


def taken(rows, count, state=None, **how):
    """The first batches, or those after a state, and the state after them."""
    loader = Loader(rows, seed=3, **{"batch": 2} | how)
    if state:
        loader.restore(json.loads(json.dumps(state)))
    batches = list(itertools.islice(loader, count))
    loader.close()
    return batches, loader.state()


# --- Formats -----------------------------------------------------------------------------------

MESSAGES = {
    "messages": [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [picture(1), text("What"), text("?")]},
        {"role": "assistant", "content": "A cat"},
        {"role": "user", "content": [text("And "), picture(2), picture(3), text("!")]},
        {"role": "assistant", "content": [text("Dogs")]},
    ]
}
LLAVA = {
    "id": 7,
    "image": ["1.png", "2.png", "3.png"],
    "conversations": [
        {"from": "system", "value": "Look."},
        {"from": "human", "value": "<image>What?"},
        {"from": "gpt", "value": "A cat"},
        {"from": "human", "value": "And <image><image>!"},
        {"from": "gpt", "value": "Dogs"},
    ],
}
TEXT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}
TEXT_LLAVA = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}
ONE = talk(text("See "), picture(4), answer="It")
ONE_LLAVA = {
    "image": "4.png",
    "conversations": [{"from": "human", "value": "See <image>"}, {"from": "gpt", "value": "It"}],
}


LONG = "system: Look.¶user: [####]What?¶assistant: A cat¶user: And [####][####]!¶assistant: Dogs¶"
EXPECTED = {  # by its text: what is learned of a conversation, and its pictures
    LONG: ("A cat¶Dogs¶", [1, 2, 3]),
    "user: Hi¶assistant: Yes¶": ("Yes¶", []),
    "user: See [####]¶assistant: It¶": ("It¶", [4]),
}


@pytest.mark.parametrize("sequence", [100, 200])
@pytest.mark.parametrize(
    ("records", "suffix"),
    [
        ([MESSAGES, TEXT, ONE], "jsonl"),
        ([MESSAGES, TEXT, ONE], "json"),
        ([LLAVA, TEXT_LLAVA, ONE_LLAVA], "jsonl"),
        ([LLAVA, TEXT_LLAVA | {"image": None}, ONE], "JSON"),
    ],
)
def test_both_formats_give_the_same_text_answers_and_pictures(records, suffix, sequence, tmp_path):
    """Whether conversations share a row or not."""
    path = paint(tmp_path, 1, 2, 3, 4) / f"a.{suffix}"
    if suffix == "jsonl":
        write_lines(path, records)
    else:
        path.write_text(json.dumps(records, indent=1))
    rows = list_of(rows_of_all(path, sequence=sequence, pictures_per_row=5))
    assert len(rows) == (2 if sequence == 100 else 1)
    assert sorted(said for row in rows for said in texts_of(row)) == sorted(EXPECTED)
    for row in rows:
        answers, numbers = zip(*map(EXPECTED.get, texts_of(row)), strict=True)
        assert answers_of(row) == "".join(answers)
        assert numbers_of(row) == [*itertools.chain(*numbers), *[0] * 5][:5]


def test_a_picture_in_an_answer_is_read_and_not_learned(tmp_path):
    answer = [text("See "), picture(1), text("!")]
    path = write_lines(paint(tmp_path, 1) / "a.jsonl", [talk(text("Draw"), answer=answer)])
    row = rows_of_all(path)[0]
    assert texts_of(row) == [f"user: Draw¶assistant: See {BLOCK}!¶"]
    assert answers_of(row) == "See !¶"
    assert IMAGE not in row.labels


def test_markers_are_special_around_pictures_and_ordinary_in_text(tmp_path):
    """Even if the tokenizer does not say that they are special."""
    special = ("<|endoftext|>", "<img>", "</img>")
    tokenizer = write_tokenizer(tmp_path / "t.json", special=special)
    content = json.loads(tokenizer.read_text())
    for token in content["added_tokens"][1:]:
        token["special"] = False
    tokenizer.write_text(json.dumps(content))
    said = [talk(text("<img>"), picture(1), answer="</img>")] * 2
    path = write_lines(paint(tmp_path, 1) / "a.jsonl", said)
    markers = {"picture_before": "<img>", "picture_after": "</img>"}
    row = open_rows(path, model=LARGE, tokenizer=str(tokenizer), **markers)[0]
    tokens = row.tokens[row.segments > 0]
    assert tokens[(tokens < 3) | (tokens == 299)].tolist() == [1, 299, 299, 299, 299, 2, 0, 0]


def test_pictures_are_found_from_the_file_or_from_the_given_root(tmp_path):
    for name, number in (("a", 1), ("b", 2), ("c", 3)):
        shutil.move(paint(tmp_path / name, number) / f"{number}.png", tmp_path / name / "7.png")
        write_lines(tmp_path / name / "talk.jsonl", [talk(picture(7))])
    talks, root = tmp_path / "[ab]/talk.jsonl", str(tmp_path / "c")
    for changes, expected in (({}, [1, 2]), ({"pictures": root}, [3, 3])):
        held_out = (str(tmp_path / "c/talk.jsonl"),)
        rows = open_rows(talks, held_out=held_out, pictures_per_row=2, **changes)
        assert sorted(numbers_of(rows[0])) == expected


# --- Rows --------------------------------------------------------------------------------------

turns = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def painted(tmp_path_factory):
    return paint(tmp_path_factory.mktemp("pictures"), *range(1, 10))


def fitting(whole, sequence):
    """As much of a conversation as fits: it ends before a picture that would not be whole."""
    blocks = re.finditer(re.escape(BLOCK), whole)
    return whole[: next((m.start() for m in blocks if m.start() < sequence < m.end()), sequence)]


@pytest.mark.parametrize("sequence", range(1, 56))
def test_a_row_of_any_length_ends_a_conversation_where_pictures_stay_whole(painted, sequence):
    said = [*talk(text("1"), picture(1), text("x"))["messages"]]
    path = write_lines(painted / "c.jsonl", [{"messages": said + talk(picture(2))["messages"]}])
    whole = "user: 1[####]x¶assistant: x¶user: [####]¶assistant: x¶"
    rows = rows_of_all(path, sequence=sequence, pictures_per_row=2)
    (row,) = list_of(rows)
    assert texts_of(row) == [fitting(whole, sequence)]
    assert [n for n in numbers_of(row) if n] == [1, 2][: texts_of(row)[0].count(BLOCK)]
    assert ("cut to that length: 1 conversation" in rows.description) == (sequence < len(whole))


@settings(max_examples=30)
@given(st.lists(turns, min_size=1, max_size=6), st.integers(16, 200), st.integers(0, 1))
def test_every_picture_is_whole_and_in_its_conversation(painted, talks, sequence, room):
    """A turn shows a picture behind its number, unless that is 0, and some letters."""
    records, wholes = [], []
    for said in talks:
        shown = [[text(f"{n}"), picture(n)] if n else [] for n, _ in said]
        parts = [[*one, text("x" * more)] for one, (_, more) in zip(shown, said, strict=True)]
        records.append({"messages": [m for part in parts for m in talk(*part)["messages"]]})
        lines = [f"{n}{BLOCK}" * (n > 0) + "x" * more for n, more in said]
        wholes.append("".join(f"user: {line}¶assistant: x¶" for line in lines))
    most = max(1, *(sum(n > 0 for n, _ in said) for said in talks)) + room
    path = write_lines(painted / "a.jsonl", records)
    rows = rows_of_all(path, sequence=sequence, pictures_per_row=most)
    found = []
    for row in list_of(rows):
        found += texts_of(row)
        named = re.findall(r"(\d)\[####\]", text_of(row.tokens))
        assert numbers_of(row) == [*map(int, named), *[0] * (most - len(named))]
        answers = re.findall(r"assistant: (x?¶?)", text_of(row.tokens[row.segments > 0]))
        assert answers_of(row) == "".join(answers)
    assert sorted(found) == sorted(fitting(whole, sequence) for whole in wholes)
    _, _, counted = rows.description.partition("; cut to that length: ")
    cut = sum(len(whole) > sequence for whole in wholes)
    assert counted == (amount(cut, "conversation") if cut else "")


def test_rows_of_any_conversations_share_one_program(painted):
    """So do the padding, and the example with which programs are compiled without data."""
    records = [talk(text("x" * 40)), talk(picture(1), picture(2)), talk(picture(3), text("y" * 90))]
    path = write_lines(painted / "b.jsonl", records)
    rows = rows_of_all(path, pictures_per_row=2)
    every = [*list_of(rows), rows.padding]
    assert sorted(map(numbers_of, every)) == [[0, 0], [0, 0], [1, 2], [3, 0]]
    data = config_of_files(path, pictures_per_row=2)
    run = SimpleNamespace(model=MODEL, data=data, sequence_length=64)
    kinds = [jax.tree.map(lambda a: (a.shape, a.dtype), row) for row in every]
    example = FAMILIES["vision_language"].example(run)
    assert kinds == [jax.tree.map(lambda a: (a.shape, a.dtype), example)] * 4
    assert not rows.has_labels(rows.padding)


def test_the_splits_share_no_conversation_and_each_has_its_own_pictures(tmp_path):
    """A conversation is about one picture, or two of those that are held out, and names them."""
    paint(tmp_path, *range(1, 31))
    groups = [*((n,) for n in range(1, 16)), *((n, n + 1) for n in range(16, 26, 2))]
    records = [talk(*map(picture, group), answer=f"{group}") for group in groups]
    path = write_lines(tmp_path / "a.jsonl", records)
    for split, expected in (("train", groups[:15]), ("held_out", groups[15:])):
        rows = open_rows(path, split=split, sequence=300, held_out_part=0.25, pictures_per_row=3)
        assert len(rows) == 5
        found = []
        for row in list_of(rows):
            said = [ast.literal_eval(answer) for answer in answers_of(row).split("¶")[:-1]]
            assert [*itertools.chain(*said)] == [n for n in numbers_of(row) if n]
            found += said
        assert sorted(found) == expected
        assert rows.description.endswith(f", with {15 if split == 'train' else 10} pictures")


def test_a_split_says_how_many_of_its_own_conversations_were_cut(tmp_path):
    path = write_talks(tmp_path, [1, 2])
    path.write_text(path.read_text() + json.dumps(talk(picture(2), answer="x" * 90)) + "\n")
    train, held_out = (open_rows(path, split=split) for split in ("train", "held_out"))
    assert train.description.endswith("with 2 pictures")
    assert held_out.description.endswith("with 1 picture; cut to that length: 1 conversation")


def test_a_batch_depends_on_config_and_number_alone_and_is_resumed_bit_for_bit(tmp_path):
    path = write_talks(tmp_path, range(1, 12))
    expected, _ = taken(open_rows(path, pictures_per_row=2), 9)
    _, state = taken(open_rows(path, pictures_per_row=2), 4)
    resumed, _ = taken(open_rows(path, pictures_per_row=2), 5, state)
    jax.tree.map(np.testing.assert_array_equal, expected[4:], resumed)
    for process in range(2):
        part, _ = taken(open_rows(path, pictures_per_row=2), 9, process=process, processes=2)
        own = jax.tree.map(lambda array: array[process : process + 1], expected)  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, own, part)
    assert len({batch.images.tobytes() for batch in expected}) > 3


@pytest.mark.parametrize(
    ("replaced", "first", "same"),
    [
        ({}, 1, True),
        ({}, 3, False),
        ({"1.png": "one.png"}, 1, False),
        ({"1.png": "0.png", "2.png": "1.png", "0.png": "2.png"}, 1, False),
        ({'"1"': '"5"'}, 1, False),
    ],
    ids=["copied", "picture", "path", "order", "text"],
)
def test_the_digest_is_that_of_text_paths_and_pictures_in_any_folder(
    replaced, first, same, tmp_path
):
    original = write_talks(tmp_path / "data", [1, 2, 3])
    copy = shutil.copytree(original.parent, tmp_path / "copy")
    shutil.copy(original.parent / f"{first}.png", copy / "1.png")
    shutil.copy(copy / "1.png", copy / "one.png")
    for old, new in replaced.items():
        content = (copy / "a.jsonl").read_text()
        assert old in content
        (copy / "a.jsonl").write_text(content.replace(old, new))
    assert (open_rows(original).digest == open_rows(copy / "a.jsonl").digest) == same


# --- Errors ------------------------------------------------------------------------------------


def refuse(message, path, **how):
    with pytest.raises(UserError, match=message) as error:
        open_rows(path, **how)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures 1 to 3, and some that are none."""
    folder = paint(tmp_path_factory.mktemp("data") / "root", 1, 2, 3)
    paint(folder.parent / "outside", 4)
    (folder / "empty.png").touch()
    (folder / "page.png").write_text("<html>\nNot found")
    (folder / "header.png").write_bytes((folder / "1.png").read_bytes()[:20])
    (folder / "link.png").symlink_to("../outside/4.png")
    return folder


def llava(*values, image=(), sender="human", **fields):
    said = [{"from": sender, "value": value, **fields} for value in values]
    return {"image": image, "conversations": [*said, {"from": "gpt", "value": "x"}]}


NOT_A_MESSAGE = ": a message is .* Training would leave out anything else, and this one has "
NOT_A_TURN = ": a turn is .* with one of human, gpt, system, and this one is "
NOTHING = " .*nothing can be learned. Its keys are "
UNEVEN = r" has {} in \"image\" and {} <image> in its text: give as many of both\."


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (talk(picture("lost")), ": There is no image .*lost.png. Paths of images are relative to"),
        (talk(picture("empty")), ": .*empty.png is empty. Download or copy it again"),
        (talk(picture("page")), ": .*page.png is no image in the formats JPEG.* Convert it"),
        (talk(picture("header")), ": .*header.png is damaged: .* copy it again"),
        (talk(picture("link")), ": link.png lies outside .* Copy it into this folder"),
        (talk(picture("../outside/4")), r": \.\./outside/4.png lies outside"),
        *(
            (talk(part), f"{NOT_A_MESSAGE}.*'role': 'user'")
            for part in (
                "Hi",
                {"type": "video", "video": "1.png"},
                {"type": "image"},
                {"type": "image", "image": {"path": "1.png"}},
                {"type": "text", "text": 5},
            )
        ),
        ({"messages": [{"role": "user", "content": {}}]}, NOT_A_MESSAGE),
        ({"messages": [{"role": "bot", "content": [picture(1)]}]}, NOT_A_MESSAGE),
        (talk(*map(picture, (1, 2, 3))), " has 3 pictures, and a row has room for 2. Raise data."),
        (llava("<image>" * 3, image=["1.png"] * 3), " has 3 pictures, and a row has room for 2. "),
        (llava("<image>"), UNEVEN.format("0 pictures", 1)),
        (llava("<image> <image>", image="1.png"), UNEVEN.format("1 picture", 2)),
        (llava("<image>", image=["1.png", "2.png"]), UNEVEN.format("2 pictures", 1)),
        (llava("Hi", image="1.png"), UNEVEN.format("1 picture", 0)),
        (llava("Hi", image=5), r': "image" is a path or a list of paths, not 5\.'),
        (llava("<image>", image=["1.png", None]), r": \"image\" is .* not \['1.png', None\]\."),
        (llava("Hi", sender="bot"), f"{NOT_A_TURN}{{'from': 'bot'"),
        (llava("Hi", sender=["human"]), NOT_A_TURN),
        (llava(5), NOT_A_TURN),
        ({"conversations": ["Hi"]}, f"{NOT_A_TURN}'Hi'"),
        (llava("Hi", tool_calls=[1]), NOT_A_MESSAGE + r"\['tool_calls'\]"),
        ({"conversations": []}, rf"{NOTHING}\['conversations', 'messages'\]"),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, NOTHING),
        ({"conversations": [{"from": "gpt", "value": "x", "weight": 0}]}, NOTHING),
        ({"messages": [{"role": "user", "content": [picture(1)]}]}, NOTHING),
        ({"image": "1.png"}, rf"{NOTHING}\['image'\]"),
        (TEXT | {"image": "1.png"}, " names pictures beside its messages, .* In a message, one is"),
        (TEXT_LLAVA | {"images": ["1.png"]}, " names pictures beside its messages"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_line(record, message, folder):
    lines = write_lines(folder / "a.jsonl", [talk(picture(1)), record, talk(picture(1))])
    refuse(rf"^{lines}:2{message}", lines, pictures_per_row=2)
    listed = folder / "a.json"
    listed.write_text(json.dumps([talk(picture(1)), record, talk(picture(1))]))
    refuse(rf"^{listed}, record 2{message}", listed, pictures_per_row=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "is no list of conversations. One a line belongs into a .jsonl."),
        ("[[]]", "is no list of conversations"),
        ('[{"image": "1.p', "is not JSON: Unterminated string"),
        ("{}\n{}\n", "is not JSON: Extra data: line 2"),
        (b"[\xff]", "is not JSON: 'utf-8' codec"),
        ("[]", ""),
    ],
)
def test_a_json_file_that_is_no_list_is_refused_by_its_name(content, message, folder):
    path = folder / "a.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    expected = f"^{path} {message}" if message else f"^There is no conversation in {path}"
    refuse(expected, path)


def test_a_picture_with_missing_data_is_named_when_its_row_is_read(tmp_path):
    path = write_talks(tmp_path, [1, 2, 3])
    damaged = (tmp_path / "2.png").read_bytes()[:48]
    numbers = [numbers_of(row) for row in list_of(rows_of_all(path, sequence=40))]
    (tmp_path / "2.png").write_bytes(damaged)
    rows = rows_of_all(path, sequence=40)
    assert numbers_of(rows[numbers.index([1])]) == [1]
    for fetch in (lambda: rows[numbers.index([2])], lambda: taken(rows, 3, batch=1)):
        with pytest.raises(UserError, match=rf"^{path}:2: .*2.png is damaged: .* copy it again"):
            fetch()


@pytest.mark.parametrize(("numbers", "sequence", "count"), [([1], 64, 0), ([1, 2, 3], 20, 2)])
def test_a_split_without_an_answer_is_refused(numbers, sequence, count, tmp_path):
    """One conversation is held out, and a row may be too short for an answer."""
    message = rf"^The train data has no answer in its {count} conversations\. Is there only one"
    refuse(message, write_talks(tmp_path, numbers), sequence=sequence)


def test_a_file_in_both_splits_is_refused(tmp_path):
    path = write_talks(tmp_path, [1, 2])
    (tmp_path / "b.jsonl").symlink_to(path)
    message = rf"^{tmp_path}/b.jsonl is named in data.train and in data.held_out: use it in one\."
    for split in ("train", "held_out"):
        refuse(message, path, held_out=(str(tmp_path / "b.jsonl"),), split=split)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    path, tokenizer = write_talks(tmp_path, [1, 2]), write_tokenizer(tmp_path / "t.json")
    message = rf"^data.tokenizer={tokenizer} has 277 tokens, and the model has 256, .* model's own"
    refuse(message, path, tokenizer=str(tokenizer))
    message = r"^data.tokenizer=None has 256 tokens, .*70,000, of which 69,999 stands for a picture"
    refuse(message, path, model=dataclasses.replace(LARGE, image_token=69_999))


@pytest.mark.parametrize("changes", [{}, {"picture_before": "~"}])
def test_a_text_that_spells_the_picture_s_token_is_refused(changes, tmp_path):
    """The model would take its place for one of a picture."""
    words = "a" if changes else "a~b"
    records = [talk(text("a")), talk(picture(1), text(words)), talk(text("a"))]
    path = write_lines(paint(tmp_path, 1) / "a.jsonl", records)
    model = dataclasses.replace(MODEL, image_token=ord("~"))
    refuse(rf"^{path}:2: its text has the token 126, which stands", path, model=model, **changes)


def test_a_config_without_data_or_room_is_refused():
    with pytest.raises(
        UserError, match=r"data.train=\(\) names no data: give paths, or 'drawings'"
    ):
        PicturesConfig(train=())
    with pytest.raises(UserError, match=r"data.pictures_per_row=0 must be a whole number"):
        PicturesConfig(pictures_per_row=0)
