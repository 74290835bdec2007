import re

import numpy as np
import pytest

from pipeline.environments.environment import Unjudged
from pipeline.types import Prompt
from tests.environments.pooled import made


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("**Answer:** (B)", "B"),
        ("Answer:\nb", "B"),
        ("The answer is $\\boxed{B}$.", "B"),
        ("the correct answer is option B", "B"),
        ("Answer: A? No, wait.\nAnswer: B", "B"),  # the last counts
        ("answer: Because of B", None),
        ("The answer is a bit unclear", None),
        ("so \\boxed{\\text{B}}", "B"),
        ("\\boxed{A}, I mean \\boxed{B}", "B"),
        ("\\boxed{A}\nAnswer: B", "B"),
        ("Maybe the answer is A. That fails. \\boxed{B}", "B"),
        ("Answer: A? \\boxed{B}, or is the answer \\boxed{B + C}?", "B"),
        ("<think>\\boxed{A}. Answer: A</think> B", "B"),
        ("<think>Answer: A</think> wait </think> I do not know", None),
        (" (b). ", "B"),
        ("\uff22", "B"),
        ("A or B", None),
        ("Answer: E", None),  # there are four choices
        ("", None),
    ],
)
def test_the_letter_of_an_answer_is_found(text: str, letter: str | None):
    assert made("multiple_choice", choices=4).answer(text) == letter


@pytest.mark.parametrize(
    "text", ["答案是 B", "答案\uff1aB", "Antwort: (B)", "La réponse est B", "الإجابة: ب", "উত্তর: খ", "Answer: B"]
)
def test_other_languages(text: str):
    assert made("multiple_choice", verifier_type="multilingual_multichoice").answer(text) == "B"
    assert made("multiple_choice").answer(text) == ("B" if text == "Answer: B" else None)


PUBLISHED = """
Answer:|Answer:\u200b\u200b\u200b\u200b\u200b\u200b|উত্তর:|उत्तर:|উত্তরঃ|উত্তর :|Antwort:|답변:|정답:|답:
答案\uff1a|答案:|答\uff1a|答:
答复\uff1a|答曰\uff1a|الإجابة:|الجواب:|إجابة:|الإجابة النهائية:|الإجابة الصحيحة:|الإجابة الصحيحة هي:|الإجابة هي:|الجواب النهائي:
Respuesta:|Risposta:|答え:|答え\uff1a|回答:|回答\uff1a|解答:|Jawaban:|Réponse:|Resposta:|Jibu:|Idahun:|Ìdáhùn:|Idáhùn:|Àmọ̀nà:
Àdáhùn:|Ànúgọ:|Àṣàyàn:"""
"""The words for "answer" that simple-evals, and NeMo-RL after it, read in answers to MMMLU."""


def test_every_published_word_for_answer_is_read():
    environment = made("multiple_choice", verifier_type="multilingual_multichoice", choices=4)
    words = re.split(r"[|\n]", PUBLISHED.strip())
    assert len(words) == 42
    for word in words:
        for letter in "ABCD":
            forms = (f"{word} {letter}", f"{word}{letter}", f"...\n**{word}** {letter}.", f"{word.lower()} {letter}")
            assert [environment.answer(form) for form in forms] == [letter] * 4, word
    for theirs, ours in zip("أبجدঅবডঢＡＢＣＤ", "ABCD" * 3, strict=True):
        assert environment.answer(f"الإجابة الصحيحة: {theirs}") == ours


def test_reward_and_metrics():
    environment = made("multiple_choice", choices=5)
    prompt = Prompt(7, np.zeros(1, np.int32), "quiz", {"answer": "(C)"})
    for text, right, silent in [("Answer: C", 1.0, 0.0), ("Answer: D", 0.0, 0.0), ("I do not know", 0.0, 1.0)]:
        outcome = environment.step(environment.reset(prompt), text)
        assert (outcome.reward, outcome.metrics) == (right, {"accuracy": right, "unparsed": silent})
        assert outcome.observation is None
    with pytest.raises(Unjudged, match="prompt 7: got the expected answer 'F'; expected a letter of ABCDE"):
        environment.step(Prompt(7, np.zeros(1, np.int32), "quiz", {"answer": "F"}), "Answer: C")
