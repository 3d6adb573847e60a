"""Commands on models that see: they ask as training did, and their answers are the library's."""

import argparse
import functools
import json
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from cli_cases import save_run, write_config, write_words
from PIL import Image
from small_model import SMALL, assert_same_files
from small_model import filled as filled_with
from tokenizer_cases import write_spaced_tokenizer, write_tokenizer

from coat_jax import evaluation, generation, models
from coat_jax.cli import main
from coat_jax.cli.arguments import add_model_arguments
from coat_jax.cli.model_folder import ModelFolder
from coat_jax.cli.pictures import Asker
from coat_jax.errors import UserError
from coat_jax.evaluation import Answer
from coat_jax.generation import continuation
from coat_jax.models import vision_language
from coat_jax.models.vision_language import Config, ImageFormat, TowerConfig
from coat_jax.models.vision_language.images import load
from coat_jax.training.config import to_json
from coat_jax.training.data import PicturesConfig
from coat_jax.training.data.picture_rows import rows_of

GREEDY = ["--temperature", "0", "--max-tokens", "12"]
FAKE = "<fake_token_around_image>"
MARKERS = ("<|endoftext|>", "<image>", "<|im_start|>", "<end_of_utterance>", FAKE, "<global-img>")
END = MARKERS.index("<end_of_utterance>")

SIZES = {"patch": 4, "width": 32, "layers": 1, "heads": 2, "ffn": 48}
LONGEST = ImageFormat(size=16, resize="longest", longest_edge=64, resample="lanczos")
CONFIG = Config(
    tower=TowerConfig(images=LONGEST, last_norm=True, rounded_places=True, **SIZES),
    decoder=replace(SMALL, layers=1, vocab=320, context=192),
    image_token=MARKERS.index("<image>"),
    precision="bf16",
    dtype=jnp.float32,
)
CLIP = {"class_token": True, "first_norm": True, "patch_bias": False, "unused": ("last_norm",)}
LLAVA = replace(
    CONFIG,
    tower=TowerConfig(images=ImageFormat(size=16, resize="crop"), **SIZES, **CLIP),
    projector="mlp",
)


def with_vocab(size, image_token):
    return replace(CONFIG, decoder=replace(CONFIG.decoder, vocab=size), image_token=image_token)


def filled(config, seed=0):
    return filled_with(config, seed, module=vision_language.VisionLanguage)


MODEL, BLIND = filled(CONFIG), filled_with(replace(SMALL, layers=1))


def coat(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Noise of several shapes."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(5):
        pixels = rng.integers(0, 256, (20 + 10 * number, 40, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A Hugging Face folder."""
    folder = tmp_path_factory.mktemp("theirs")
    vision_language.hf.save(folder, MODEL, extra={"eos_token_id": END})
    write_tokenizer(folder / "tokenizer.json", 320, MARKERS)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The same model as a run, in its last checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    save_run(folder, filled(CONFIG, seed=1), MODEL)
    data = PicturesConfig(
        template="<|im_start|>{Role}: {content}.{end}\n",
        picture_before=f"{FAKE}<global-img>",
        picture_after=FAKE,
        tokenizer=str(write_tokenizer(folder / "words.json", 320, MARKERS)),
        end_of_text=END,
    )
    write_config(folder, CONFIG, data=to_json(data))
    return folder


def answer_to(model, prompt, *files, count=12, stops=(END,)):
    """The tokens that the library gives."""
    pixels = [load(file, model.config.tower.images, "") for file in files]
    sampling = generation.Sampling(temperature=0)
    settings = {"max_tokens": count, "sampling": sampling, "stops": stops, "images": [pixels]}
    return generation.generate(model, [prompt], **settings)[0]


# --- coat generate --image -------------------------------------------------------------------


def said_to(model, file, text, *files):
    """What the library says after a text, in which a picture is <image>.

    Its tokens are those of the `tokenizers` library, as transformers would have them.
    """
    whole = text.replace("<image>", "<image>" * model.config.features)
    prompt = tokenizers.Tokenizer.from_file(str(file)).encode(whole).ids
    reader = generation.Tokenizer(file).reader(prompt)
    return reader.read(answer_to(model, prompt, *files)) + reader.end()


PICTURE = f"{FAKE}<global-img><image>{FAKE}"
AS_SMOLVLM = "<|im_start|>User:{}<end_of_utterance>\nAssistant:"


@pytest.mark.parametrize(("names", "others"), [("3", "0"), ("12", "21")])
def test_a_model_of_hugging_face_is_asked_as_its_family_usually_is(
    names, others, theirs, pictures, capsys
):
    """All prompts are about the same pictures, of which there may be several, in order."""
    files, other_files = ([pictures / f"{name}.png" for name in of] for of in (names, others))
    options = [option for file in files for option in ("--image", file)]
    assert coat("generate", theirs, *options, "--prompt", "A?", "--prompt", "é", *GREEDY) == 0

    def said(question, *files):
        text = AS_SMOLVLM.format(PICTURE * len(files) + question)
        return said_to(MODEL, theirs / "tokenizer.json", text, *files)

    one, other = said("A?", *files), said("é", *files)
    assert capsys.readouterr().out == f"A?\n{one}\n---\né\n{other}\n"
    assert one != said("A?", *other_files)


def test_llava_is_asked_in_its_own_way_after_the_token_that_begins_a_text(
    pictures, tmp_path, capsys
):
    model = filled(LLAVA)
    vision_language.hf.save(tmp_path / "llava", model, extra={"eos_token_id": END})
    words, image = tmp_path / "llava/tokenizer.json", pictures / "0.png"
    made = tokenizers.Tokenizer.from_file(str(write_tokenizer(words, 320, MARKERS)))
    begin = {"single": "<|im_start|> $A", "special_tokens": [("<|im_start|>", 2)]}
    made.post_processor = tokenizers.processors.TemplateProcessing(**begin)
    made.save(str(words))
    assert coat("generate", tmp_path / "llava", "--image", image, "--prompt", "A?", *GREEDY) == 0
    said = said_to(model, words, "USER: <image>\nA? ASSISTANT:", image)
    assert capsys.readouterr().out == f"A?\n{said}\n"


OWN = f"<|im_start|>User: {PICTURE}A?.<end_of_utterance>\n<|im_start|>Assistant: "
OTHER = ["--question-template", "the {question}<|im_start|>"], f"the {PICTURE}A?<|im_start|>"


@pytest.mark.parametrize(("options", "text"), [([], OWN), OTHER], ids=["its own", "another"])
def test_a_run_is_asked_by_the_template_of_its_data_or_by_another(
    options, text, run, pictures, capsys
):
    image = pictures / "4.png"
    assert coat("generate", run, "--image", image, "--prompt", "A?", *options, *GREEDY) == 0
    assert capsys.readouterr().out == f"A?\n{said_to(MODEL, run / 'words.json', text, image)}\n"


def asker_of(folder, template=None):
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    return Asker(ModelFolder(parser.parse_args([str(folder)])), template)


TEMPLATES = [
    "{role}: {content}{end}",
    "<|im_start|>{Role}: {content}{end}\n\n",
    "the {role} {content} then{end}the",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tokenizer", ["bytes", "BPE", "prepend", "first", "always"])
def test_the_tokens_of_a_question_are_those_of_training(tokenizer, template, tmp_path, pictures):
    """Up to where the answer begins, whatever the tokenizer puts in front of a text."""
    file, question = tmp_path / "words.json", "the <s> [user]?"
    if tokenizer == "BPE":
        write_tokenizer(file, 320, MARKERS)
    elif tokenizer != "bytes":
        write_spaced_tokenizer(file, tokenizer)
    vocab = 320 if file.exists() else 256
    config = with_vocab(vocab, vocab - 1)
    content = [{"type": "image", "image": "0.png"}, {"type": "text", "text": question}]
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "they"}]
    (pictures / "a.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 2)
    data = PicturesConfig(
        train=(str(pictures / "a.jsonl"),),
        tokenizer=str(file) if file.exists() else None,
        template=template,
        picture_before=FAKE,
        picture_after="\n",
    )
    write_config(tmp_path, config, data=to_json(data))
    asked = asker_of(tmp_path).tokens(question, 1)
    row = rows_of(data, config, split="train", sequence=160)[0]
    assert asked == row.tokens[: len(asked)].tolist()
    (learned,) = np.flatnonzero(row.labels[: len(asked)] >= 0)
    assert learned == len(asked) - 1  # the answer begins with the next token


@pytest.mark.parametrize(
    ("where", "arguments", "named"),
    [
        ("TEXT", "--image 0.png", "sees no pictures"),
        ("RUN", "--image none.png", "There is no image none.png."),
        ("RUN", "--image a.txt", "--image: PICTURES/a.txt is no image in the formats JPEG"),
        ("RUN", "--question-template {question}", "is for pictures (--image FILE): leave it out"),
        ("RUN", "--image 0.png --question-template Q:", "'Q:' must have {question} once"),
        ("RUN", "--image 0.png --question-template {question}{question}", "have {question} once"),
        (
            "RUN",
            "--image 0.png " * 40,
            "--image: the question and 40 pictures are 782 tokens, and the model's context=192",
        ),
    ],
)
def test_what_cannot_be_asked_ends_in_one_line_and_code_2(
    where, arguments, named, run, pictures, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(pictures)
    (pictures / "a.txt").write_text("text")
    models.hf.save(tmp_path / "text", BLIND)
    folder = {"TEXT": tmp_path / "text", "RUN": run}[where]
    assert coat("generate", folder, "--prompt", "A?", *arguments.split()) == 2
    said = capsys.readouterr()
    assert named.replace("PICTURES", str(pictures)) in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


# --- coat evaluate ---------------------------------------------------------------------------

WORDS = "<eos>", "yes", "no", "is", "it", "red", "<image>", "<unk>"
ASK = ["--question-template", "is {question}"]
ABOUT = ["red", "red", "yes", "red", "no", "no", "yes", "it"]
QUESTIONS = [(number % 5, about) for number, about in enumerate(ABOUT)]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """A model that says yes and no, in a Hugging Face folder: all other words have logits of 0."""
    config = with_vocab(len(WORDS), WORDS.index("<image>"))
    model, folder = filled(config, seed=1), tmp_path_factory.mktemp("speaker")
    end, yes = np.random.default_rng(3).standard_normal((2, config.decoder.width))
    head = jnp.zeros_like(model.decoder.head[...]).at[:, 0].set(end / 2)
    model.decoder.head[...] = head.at[:, 1].set(yes).at[:, 2].set(-yes)
    vision_language.hf.save(folder, model)
    special = [word for word in WORDS if word.startswith("<")]
    write_words(folder / "tokenizer.json", *WORDS, unknown="<unk>", special=special)
    return folder, model


@pytest.fixture(scope="module")
def said(speaker, pictures):
    """What the library says to each question."""
    _, model = speaker
    picture = ["<unk>"] * 7 + ["<image>"] * model.config.features + ["<unk>"] * 3
    spoken = []
    for number, question in QUESTIONS:
        prompt = [WORDS.index(word) for word in ("is", *picture, question)]
        answer = answer_to(model, prompt, pictures / f"{number}.png", count=32, stops=[0])
        spoken.append(" ".join(WORDS[token] for token in answer))
    assert len({spoken[0], spoken[1], spoken[3]}) > 1  # the pictures matter
    return spoken


def write_questions(file, people, questions=QUESTIONS):
    lines = [
        {"image": f"{number}.png", "question": question, "answers": of_one}
        for (number, question), of_one in zip(questions, people, strict=True)
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def evaluate(capsys, folder, *arguments):
    assert coat("evaluate", folder, *arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("how", [["--batch", 3], ["--batch", 1], ["--batch", 4, "--devices", 2]])
def test_answers_are_scored_whatever_the_batch(how, speaker, said, pictures, capsys):
    """The last batch is not full, and takes no program of its own. Two devices share each."""
    people = [[text] * n + ["red"] * (12 - n) for n, text in enumerate(said)]
    yes_no = [["yes"] if n % 2 else ["no", "No."] for n in range(len(said))]
    files = [
        write_questions(pictures / "vqa.jsonl", people),
        write_questions(pictures / "pope.jsonl", yes_no),
    ]
    programs = continuation._begin._cache_size()
    found = json.loads(evaluate(capsys, speaker[0], "--vqa", *files, *ASK, *how, "--json"))
    assert continuation._begin._cache_size() <= programs + 1
    first, second = (
        evaluation.score([Answer(*of_one) for of_one in zip(said, of_all, strict=True)])
        for of_all in (people, yes_no)
    )
    assert found["vqa"] == [
        {
            "file": str(file),
            "questions": 8,
            "exact": wanted.exact.share,
            "interval_95": list(wanted.exact.interval),
            "vqa_accuracy": wanted.vqa,
            "yes": wanted.yes._asdict() if wanted.yes else {},
        }
        for file, wanted in zip(files, (first, second), strict=True)
    ]
    assert first.exact.right == 7
    assert 0 < first.vqa < 1
    assert 0 < second.yes.precision < 1
    assert second.vqa is first.yes is None


def test_the_table_has_columns_for_what_is_known(speaker, said, pictures, capsys):
    """What a file has not is left empty, as is a share of nothing."""
    says_no = [text.startswith("no") for text in said].index(True)
    one = write_questions(pictures / "one.jsonl", [["red"]], QUESTIONS[:1])
    ten = write_questions(pictures / "ten.jsonl", [[text] * 10 for text in said])
    no = write_questions(pictures / "no.jsonl", [["no"]], QUESTIONS[says_no:][:1])
    head, row = evaluate(capsys, speaker[0], "--vqa", one, *ASK).splitlines()
    assert head.split("  ")[0] == "questions about pictures"
    assert head.split()[3:] == ["questions", "exact", "(95", "%)"]
    assert row.split() == [str(one), "1", "0.0", "%", "(0.0", "to", "79.3)"]
    head, *rows = evaluate(capsys, speaker[0], "--vqa", one, ten, no, *ASK).splitlines()
    assert head.split()[7:] == ["VQA", "accuracy", "precision", "recall", "F1", "yes"]
    assert rows[0].split() == row.split()
    assert rows[1].split()[2:] == ["100.0", "%", "(67.6", "to", "100.0)", "100.00", "%"]
    assert rows[2].split()[2:] == ["0.0", "%", "(0.0", "to", "79.3)", "0.0", "%"]
    assert len(rows[1]) == head.index("  precision")
    assert len(rows[2]) == len(head)


NO_QUESTION = 'a question is {"image": "...", "question": "...", "answers": ["..."]}, and this one'


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "is not JSON"),
        *(({"answers": value}, NO_QUESTION) for value in (None, [], "yes", [2], 2)),
        *(({"image": value}, NO_QUESTION) for value in (None, [], 3, ["0.png", 3])),
        ({"question": None}, NO_QUESTION),
        ({"image": "none.png"}, "There is no image PICTURES/none.png. Paths of images are"),
        ({"image": "../out.png"}, "../out.png lies outside PICTURES"),
        ({"question": "?" * 200}, "the question and 1 picture are 239 tokens, and the model's con"),
    ],
)
def test_a_line_that_is_no_question_is_named(line, named, run, pictures, capsys):
    good = {"image": ["0.png", "1.png"], "question": "A?", "answers": ["yes"]}
    text = line if isinstance(line, str) else json.dumps(good | {"image": "0.png"} | line)
    (pictures / "bad.jsonl").write_text(f"{json.dumps(good)}\n{text}\n")
    assert coat("evaluate", run, "--vqa", pictures / "bad.jsonl") == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"coat evaluate: {pictures / 'bad.jsonl'}:2")
    assert named.replace("PICTURES", str(pictures)) in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_file_without_questions_and_a_model_without_eyes_are_refused(
    run, pictures, tmp_path, capsys
):
    (pictures / "empty.jsonl").write_text("\n")
    assert coat("evaluate", run, "--vqa", pictures / "empty.jsonl") == 2
    assert "empty.jsonl has no question" in capsys.readouterr().err
    models.hf.save(tmp_path / "text", BLIND)
    assert coat("evaluate", tmp_path / "text", "--vqa", pictures / "empty.jsonl") == 2
    assert "The model in" in (said := capsys.readouterr().err)
    assert "sees no pictures" in said


def test_a_question_that_spells_a_picture_out_as_a_token_is_refused(tmp_path, pictures):
    """Its tokenizer knows <image> as an ordinary token."""
    write_words(tmp_path / "tokenizer.json", *WORDS, unknown="<unk>")
    config = with_vocab(len(WORDS), WORDS.index("it"))
    said = vision_language.hf.config.to_json(config, jnp.float32)
    (tmp_path / "config.json").write_text(json.dumps(said))
    ask = functools.partial(asker_of(tmp_path).ask, root=pictures, where="a.jsonl:3")
    assert ask("is red", ["0.png"]).tokens[-2:]
    with pytest.raises(UserError, match=r"^a.jsonl:3: the question has the token 4, which stands"):
        ask("is it red", ["0.png"])


def test_of_texts_and_choices_the_decoder_alone_is_asked(theirs, tmp_path, capsys):
    text, tasks = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("then they thought that\n" * 8)
    tasks.write_text(json.dumps({"question": "that", "choices": ["thing", "then"], "answer": 0}))
    models.hf.save(tmp_path / "alone", MODEL.decoder, extra={"eos_token_id": END})
    shutil.copy(theirs / "tokenizer.json", tmp_path / "alone")
    found, alone = (
        json.loads(evaluate(capsys, folder, "--text", text, "--tasks", tasks, "--json"))
        for folder in (theirs, tmp_path / "alone")
    )
    assert found | {"model": alone["model"]} == alone
    assert found["texts"][0]["tokens"] > 30
    assert (found["precision"], found["vqa"]) == ("bf16", [])


# --- coat convert ----------------------------------------------------------------------------


def test_a_run_becomes_a_hugging_face_folder_that_says_the_same(
    run, theirs, pictures, tmp_path, capsys
):
    assert coat("convert", run, tmp_path / "out") == 0
    assert coat("convert", tmp_path / "out", tmp_path / "again") == 0
    assert capsys.readouterr().err == ""
    options = ["--image", pictures / "0.png", "--prompt", "A?", *GREEDY]
    assert coat("generate", theirs, *options) == 0
    said = capsys.readouterr().out
    for folder in (tmp_path / "out", tmp_path / "again"):
        assert_same_files(folder, theirs)
        for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
            assert (folder / name).read_text() == (theirs / name).read_text()
        assert coat("generate", folder, *options) == 0
        assert capsys.readouterr().out == said


@pytest.mark.parametrize("option", [["--to", "int8"], ["--balance", "TEXT"]])
def test_models_that_see_are_not_quantized(option, run, theirs, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a text " * 200)
    option = [tmp_path / "a.txt" if word == "TEXT" else word for word in option]
    for folder in (run, theirs):
        assert coat("convert", folder, tmp_path / "out", *option) == 2
        said = capsys.readouterr().err
        assert "holds a vision_language model, and only decoders can be quantized" in said
        assert said.count("\n") == 1
        assert not (tmp_path / "out").exists()
