"""How well a model predicts texts and answers multiple-choice questions.

    perplexity           of texts of any length, in windows
    accuracies           of questions with several choices, from files that `read` reads
    score                of answers in free text, compared with people's
    log_probabilities    beneath both: of tokens, each after those before it

    score, = perplexity(model, [tokens], [size])
    print(score.perplexity, score.bits_per_byte)

The trainer's own evaluation is the mean loss over batches of held-out rows.
"""

from coat_jax.evaluation.answers import Answer, Scores, YesNo, score
from coat_jax.evaluation.likelihood import Passage, log_probabilities
from coat_jax.evaluation.multiple_choice import Accuracies, Accuracy, Question, accuracies, read
from coat_jax.evaluation.perplexity import Score, combine, perplexity, windows

__all__ = [
    "Accuracies",
    "Accuracy",
    "Answer",
    "Passage",
    "Question",
    "Score",
    "Scores",
    "YesNo",
    "accuracies",
    "combine",
    "log_probabilities",
    "perplexity",
    "read",
    "score",
    "windows",
]
