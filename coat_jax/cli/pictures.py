"""Questions about pictures, as vision-language models were trained to read them.

    begin, pictures, question, end            then the model answers

For the model of a run, these are a user's message and the beginning of the assistant's, by
`data.template`; for one of Hugging Face, the usual prompt of its family, or --question-template.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from coat_jax import generation
from coat_jax.cli.model_folder import ModelFolder, data_of
from coat_jax.errors import UserError
from coat_jax.evaluation import Answer
from coat_jax.files import json_lines
from coat_jax.models.vision_language import Config
from coat_jax.models.vision_language.images import load, read_header
from coat_jax.printable import amount
from coat_jax.training.data import chat
from coat_jax.training.data.pictures import PicturesConfig, picture_tokens
from coat_jax.validation import brief

QUESTION = "{question}"
MOST_TOKENS = 32  # of an answer
FAKE = "<fake_token_around_image>"
SMOLVLM = f"<|im_start|>User:{QUESTION}<end_of_utterance>\nAssistant:", f"{FAKE}<global-img>", FAKE
FAMILIES = {  # the template of a question, and what is before and after a picture
    "SmolVLMForConditionalGeneration": SMOLVLM,
    "Idefics3ForConditionalGeneration": SMOLVLM,
    "LlavaForConditionalGeneration": (f"USER: {QUESTION} ASSISTANT:", "", "\n"),
}


def add_question_template(parser: argparse.ArgumentParser) -> None:
    """Declares the option that says how a question is written."""
    shown = "how a question about a picture is written, as in 'USER: {question} ASSISTANT:'"
    parser.add_argument("--question-template", metavar="TEXT", help=shown)


class Asked(NamedTuple):
    """A question as tokens, and the files of its pictures."""

    tokens: list[int]
    pictures: tuple[Path, ...]


class Asker:
    """Turns questions into tokens.

    Args:
        folder: of a model that sees.
        template: of a question, in place of the usual one; special tokens in it count as such.
    """

    def __init__(self, folder: ModelFolder, template: str | None):
        if not isinstance(folder.config, Config):
            raise UserError(f"The model in {folder.where} sees no pictures.")
        self._config, self._tokenizer = folder.config, folder.tokenizer
        data = data_of(folder.config_json)
        (named,) = folder.config_json.get("architectures", [""])[:1]
        usual, before, after = FAMILIES.get(named, ("", "", ""))
        if data:
            before, after = data["picture_before"], data["picture_after"]
        if template is None and data:
            head, after_content, after_end = chat.parts_of(data["template"])
            self._begin = self._markers(chat.for_role(head, "user"), "nothing")
            # Part by part, as in training: tokens may span parts that are read together.
            self._end = [*self._markers(after_content, "text"), folder.stops[0]]
            self._end += self._markers(after_end, "end")
            answer = chat.for_role(head, chat.LEARNED)
            self._end += self._markers(answer, "text" if after_end else "end")
        else:
            template = usual if template is None else template
            if template.count(QUESTION) != 1:
                raise UserError(f"--question-template {brief(template)} must have {QUESTION} once.")
            begin, end_text = template.split(QUESTION)
            self._begin = folder.tokenizer.encode("")[:1] + self._markers(begin, "nothing")
            self._end = self._markers(end_text, "text")
        around = PicturesConfig(picture_before=before, picture_after=after)
        self._picture = picture_tokens(folder.tokenizer, around, folder.config)

    def _markers(self, text: str, after: Any) -> list[int]:
        return self._tokenizer.encode_markers(text, after=after).tolist() if text else []

    def ask(
        self, question: str, pictures: Sequence[str | Path], *, root: Path, where: str
    ) -> Asked:
        """Returns a question, after its pictures; reads the headers of these.

        Args:
            question: the text.
            pictures: paths, relative to `root`.
            root: the folder that has the pictures.
            where: the place that names them, for errors.
        """
        images = self._config.tower.images
        files = [read_header(path, images, root=root, where=where) for path in pictures]
        tokens, config = self.tokens(question, len(files)), self._config
        if tokens.count(config.image_token) != len(files) * config.features:
            raise UserError(
                f"{where}: the question has the token {config.image_token}, which stands for a "
                "picture. Remove it there."
            )
        if len(tokens) >= config.context:
            raise UserError(
                f"{where}: the question and {amount(len(files), 'picture')} are {len(tokens):,} "
                f"tokens, and the model's context={config.context:,} must hold one more. Shorten "
                "the question, or ask about fewer pictures."
            )
        return Asked(tokens, tuple(files))

    def tokens(self, question: str, pictures: int) -> list[int]:
        """Returns the tokens of a question, after so many pictures."""
        (text,) = self._tokenizer.encode_documents([question], continued=True)
        return [*self._begin, *self._picture * pictures, *text.tolist(), *self._end]

    def pixels(self, asked: Asked) -> list[UInt8[np.ndarray, "S S 3"]]:
        """Returns the pictures of a question."""
        return [load(path, self._config.tower.images, str(path)) for path in asked.pictures]


class Question(NamedTuple):
    """A question, and what people answered."""

    asked: Asked
    people: tuple[str, ...]


def read_questions(path: Path, asker: Asker) -> list[Question]:
    """Returns the questions of a file, each on a line; reads the headers of all pictures."""
    found = []
    for where, record, _ in json_lines(path):
        picture: Any = record.get("image")
        question: Any = record.get("question")
        people: Any = record.get("answers")
        pictures = [picture] if isinstance(picture, str) else picture
        if not all(map(_has_texts, ([question], pictures, people))):
            raise UserError(
                f'{where}: a question is {{"image": "...", "question": "...", "answers": ["..."]}}'
                f", and this one is {brief(record)}."
            )
        asked = asker.ask(question, pictures, root=path.parent, where=where)
        found.append(Question(asked, tuple(people)))
    if not found:
        raise UserError(f"{path} has no question.")
    return found


def _has_texts(value: Any) -> bool:
    """Returns whether this is a list of one text or more."""
    return isinstance(value, list) and value != [] and all(isinstance(x, str) for x in value)


def answer(
    model: Any,
    folder: ModelFolder,
    asker: Asker,
    questions: Sequence[Question],
    *,
    batch: int,
    progress: Callable[[int, int], object],
) -> list[Answer]:
    """Returns the model's answers, of the likeliest token each time."""
    answers = []
    for first in range(0, len(questions), batch):
        chosen = questions[first : first + batch]
        prompts = [one.asked.tokens for one in chosen]
        # A batch that is not full would be another program.
        full = [*chosen, *[chosen[-1]] * (batch - len(chosen))]
        found = generation.generate(
            model,
            [one.asked.tokens for one in full],
            max_tokens=MOST_TOKENS,
            sampling=generation.Sampling(temperature=0),
            stops=folder.stops,
            images=[asker.pixels(one.asked) for one in full],
        )
        for one, prompt, new in zip(chosen, prompts, found, strict=False):
            reader = folder.tokenizer.reader(prompt)
            answers.append(Answer(reader.read(new) + reader.end(), one.people))
        progress(len(answers), len(questions))
    return answers
