r"""Judge answers to multiple-choice questions: compare the text's letter with the expected letter.

If the text has </think>, only the text after the last </think> counts. The last letter in one of these forms is the answer:
    after "Answer:" (Answer: B, **Answer:** (b)), or as a capital after "answer is" (the answer is $\boxed{B}$, the correct
    answer is option B), in the chosen languages; or in a box, \boxed{B}
Without any of these, the text is an answer only if it is a letter alone: B, (B), B.
Markdown and LaTeX around a letter are ignored. A letter outside `choices` is no answer.

NeMo-RL's verifiers `english_multichoice` and `multilingual_multichoice` take the first letter after "Answer:" rather than the
last, and accept no other form.

Leaves out: several right letters, answers that repeat the option's text.
"""

from __future__ import annotations

import functools
import re
import string
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from typing_extensions import override

from pipeline.environments.environment import THOUGHT_ENDS, BuiltinEnvironment, EnvironmentContext, Outcome, Unjudged
from pipeline.recipe.values import Int

if TYPE_CHECKING:
    from pipeline.types import Prompt

ENGLISH = ("answer is", "answer")
OTHERS = (
    *("antwort ist", "antwort", "réponse est", "réponse", "respuesta es", "respuesta", "resposta é", "resposta"),
    *("risposta è", "risposta", "jawabannya adalah", "jawabannya", "jawaban", "jibu"),
    *("ìdáhùn", "idáhùn", "idahun", "àmọ̀nà", "àdáhùn", "ànúgọ", "àṣàyàn"),
    *("答案是", "答案", "答复", "答曰", "答", "正解は", "正解", "答えは", "答え", "回答", "解答"),
    *("정답은", "정답", "답변", "답"),
    *("الإجابة الصحيحة هي", "الإجابة الصحيحة", "الإجابة النهائية", "الإجابة هي", "الإجابة", "إجابة"),
    *("الجواب النهائي", "الجواب"),
    *("उत्तर", "উত্তরঃ", "উত্তর"),
)
"""Words for "answer" in the languages of MMMLU: German, French, Spanish, Portuguese, Italian, Indonesian, Swahili, Yoruba,
Chinese, Japanese, Korean, Arabic, Hindi, Bengali. They include all words that simple-evals and NeMo-RL read."""
SENTENCES = {word for word in ENGLISH if " " in word} | {
    *("antwort ist", "réponse est", "respuesta es", "resposta é", "risposta è", "jawabannya adalah"),
    *("答案是", "正解は", "答えは", "정답은", "الإجابة الصحيحة هي", "الإجابة هي", "উত্তরঃ"),
}
"""Phrases that need no colon before the letter: "the answer is B"."""
INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200e\u200f\u2060\ufeff"))
"""Characters without width that some answers have after the colon."""
ALPHABETS = ("أبجد", "অবডঢ", "कखगघ", "কখগঘ")
"""Answer letters in Arabic, Bengali, Hindi and Bengali again; the first stands for A, and so on."""
LETTERS = {letter: string.ascii_uppercase[i] for alphabet in ALPHABETS for i, letter in enumerate(alphabet)}

WRAPPING = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{|[*_$`{}()\[\]【】《》「」]|\\\(|\\\)")
BOXED = re.compile(r"\\boxed\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)?)\}")

NORMALIZED_AT_ONCE = 1024  # characters: normalizing n combining marks in a row takes O(n * n)


@dataclass
class MultipleChoiceArguments:
    """The kwargs of `kind: multiple_choice`."""

    verifier_type: Literal["english_multichoice", "multilingual_multichoice"] = "english_multichoice"
    """multilingual_multichoice reads "Answer:" and letters of other languages too."""
    choices: Annotated[Int, Field(ge=2, le=26)] = 26
    """Number of letters, from A on."""


class MultipleChoice(BuiltinEnvironment):
    """Rewards a text whose letter is that of `prompt.task["answer"]` with 1, else 0.

    Metrics: `accuracy`; `unparsed`, 1 if the text has no letter.
    """

    Arguments = MultipleChoiceArguments

    @classmethod
    @override
    def check_answer(cls, answer: str, arguments: MultipleChoiceArguments) -> None:
        _reader(arguments.verifier_type, arguments.choices).expected_letter(answer)

    def __init__(self, arguments: MultipleChoiceArguments, context: EnvironmentContext | None) -> None:
        multilingual, choices = arguments.verifier_type == "multilingual_multichoice", arguments.choices
        words = (*ENGLISH, *OTHERS) if multilingual else ENGLISH
        self._letters = string.ascii_uppercase[:choices]
        self._foreign = {foreign: latin for foreign, latin in LETTERS.items() if latin in self._letters} if multilingual else {}
        letter_pattern = f"[{self._letters}{self._letters.lower()}{''.join(self._foreign)}]"
        # A word needs a colon or an "is" after it, and the letter must not begin another word: "answer: Because".
        phrases = "|".join(
            re.escape(unicodedata.normalize("NFKC", word)) + ("" if word in SENTENCES else r"(?=[ \t]*:)") for word in words
        )
        self._answer = re.compile(
            rf"(?:{phrases})(?:[ \t]*(:)\s*|\s*)(?:option\s+|choice\s+)?({letter_pattern})(?!\w)", re.IGNORECASE
        )
        self._alone = re.compile(rf"\s*({letter_pattern})\s*(?:[.:)]\s*)?", re.IGNORECASE)

    def step(self, prompt: Prompt, text: str) -> Outcome:
        """Judge the letter of the text. Raises Unjudged if the expected answer is not a letter."""
        try:
            expected = self.expected_letter(prompt.task["answer"])
        except ValueError as error:
            raise Unjudged(f"prompt {prompt.index}: {error}") from None
        letter = self.answer(text)
        right = float(letter == expected)
        return Outcome(right, {"accuracy": right, "unparsed": float(letter is None)}, extracted=letter or "")

    def expected_letter(self, answer: str) -> str:
        """Return the letter of an expected answer as a Latin capital. Raises ValueError if it is not a letter of `choices`."""
        if (letter := self._letter_of(answer)) is None:
            raise ValueError(f"got the expected answer {answer!r}; expected a letter of {self._letters}")
        return letter

    def answer(self, text: str) -> str | None:
        """Return the letter of the text's answer as a Latin capital; None if it has none."""
        text = text.rpartition(THOUGHT_ENDS)[2].translate(INVISIBLE)
        pieces = range(0, len(text), NORMALIZED_AT_ONCE)
        text = "".join(unicodedata.normalize("NFKC", text[i : i + NORMALIZED_AT_ONCE]) for i in pieces)  # Ａ is A
        matches = self._answer.findall(WRAPPING.sub("", BOXED.sub(self._unbox, text)))
        if letters := [letter for colon, letter in matches if colon or not letter.islower()]:  # "the answer is a bit unclear"
            return self._latin(letters[-1])
        return self._letter_of(text)

    def _unbox(self, box: re.Match[str]) -> str:
        """Return a boxed letter as "Answer: B", so that one search finds both forms in the order of the text."""
        letter = self._letter_of(box[1])
        return f"\nAnswer: {letter}\n" if letter else box[0]

    def _letter_of(self, text: str) -> str | None:
        match = self._alone.fullmatch(WRAPPING.sub("", text))
        return self._latin(match[1]) if match else None

    def _latin(self, letter: str) -> str:
        return self._foreign.get(letter, letter.upper())


@functools.lru_cache(maxsize=8)
def _reader(verifier_type: Any, choices: int) -> MultipleChoice:
    return MultipleChoice(MultipleChoiceArguments(verifier_type, choices), None)
