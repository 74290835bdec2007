r"""Multiple choice: the letter that a text answers with, compared with the expected one.

What counts as the answer, in what follows the last </think>, if there is one; of several, the last one said:
    what stands after "Answer:" (Answer: B, **Answer:** (b)), or as a capital after "answer is" (the answer is $\boxed{B}$, the
    correct answer is option B), in the language asked for; or in a box, \boxed{B}
and where there is none of these, all of it, if it is nothing but a letter: B, (B), B.
Markdown and LaTeX around a letter do not matter. A letter outside `choices` is no answer.

NeMo-RL's verifiers `english_multichoice` and `multilingual_multichoice` take the first letter said after "Answer:", not the
last, and know nothing of the rest.

Leaves out: several right letters, answers that repeat the option's text.
"""

from __future__ import annotations

import re
import string
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pipeline.environments.base import BuiltinEnvironment, EnvironmentContext, Outcome, Unjudged
from pipeline.environments.tool_calls import THOUGHT_ENDS
from pipeline.values import Int

if TYPE_CHECKING:
    from pipeline.types import Prompt

ENGLISH = ("answer is", "answer")
OTHERS = (
    *("antwort ist", "antwort", "réponse est", "réponse", "respuesta es", "respuesta", "resposta é", "resposta"),
    *("risposta è", "risposta", "jawabannya adalah", "jawabannya", "jawaban", "jibu", "ìdáhùn", "idahun"),
    *("答案是", "答案", "正解は", "正解", "答えは", "答え", "回答", "解答", "정답은", "정답", "답변", "답"),
    *("الإجابة هي", "الإجابة", "الجواب", "إجابة", "उत्तर", "উত্তর"),
)
"""German, French, Spanish, Portuguese, Italian, Indonesian, Swahili, Yoruba, Chinese, Japanese, Korean, Arabic, Hindi,
Bengali: the languages of MMMLU."""
SENTENCES = {word for word in (*ENGLISH, *OTHERS) if " " in word} | {"答案是", "正解は", "答えは", "정답은"}
"""After which a letter may come with no colon between: "the answer is B"."""
ALPHABETS = ("أبجد", "অবডঢ", "कखगघ", "কখগঘ")
"""Letters of answers in Arabic, Bengali, Hindi and Bengali again: the first stands for A, and so on."""
LETTERS = {letter: string.ascii_uppercase[i] for alphabet in ALPHABETS for i, letter in enumerate(alphabet)}

WRAPPING = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{|[*_$`{}()\[\]【】《》「」]|\\\(|\\\)")
BOXED = re.compile(r"\\boxed\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)?)\}")

NORMALIZED_AT_ONCE = 1024  # characters: of n combining marks in a row it sorts each into its place, in steps of n * n


@dataclass
class MultipleChoiceArguments:
    verifier_type: Annotated[
        Literal["english_multichoice", "multilingual_multichoice"],
        Field(description='multilingual_multichoice reads "Answer:" and letters of other languages too.'),
    ] = "english_multichoice"
    choices: Annotated[Int, Field(ge=2, le=26, description="Number of letters, from A on.")] = 26


class MultipleChoice(BuiltinEnvironment):
    """Reward 1 if the text's letter is that of `prompt.task["answer"]`, else 0. Metrics: `accuracy`; `no_answer`, 1 if it has
    none.
    """

    Arguments = MultipleChoiceArguments

    def __init__(self, arguments: MultipleChoiceArguments, setup: EnvironmentContext) -> None:
        multilingual, choices = arguments.verifier_type == "multilingual_multichoice", arguments.choices
        words = (*ENGLISH, *OTHERS) if multilingual else ENGLISH
        self._letters = string.ascii_uppercase[:choices]
        self._foreign = {there: here for there, here in LETTERS.items() if here in self._letters} if multilingual else {}
        one_of = f"[{self._letters}{self._letters.lower()}{''.join(self._foreign)}]"
        # A word needs a colon or an "is" behind it, and the letter must not begin another word: "answer: Because".
        said = "|".join(re.escape(word) + ("" if word in SENTENCES else r"(?=[ \t]*:)") for word in words)
        self._said = re.compile(rf"(?:{said})(?:[ \t]*(:)\s*|\s*)(?:option\s+|choice\s+)?({one_of})(?!\w)", re.IGNORECASE)
        self._alone = re.compile(rf"\s*({one_of})\s*(?:[.:)]\s*)?", re.IGNORECASE)

    def step(self, prompt: Prompt, text: str) -> Outcome:
        """Raises Unjudged if the expected answer is no letter."""
        expected = self._letter_of(prompt.task["answer"])
        if expected is None:
            raise Unjudged(
                f"prompt {prompt.index}: the expected answer {prompt.task['answer']!r} is no letter of {self._letters}"
            )
        letter = self.answer(text)
        right = float(letter == expected)
        return Outcome(right, {"accuracy": right, "no_answer": float(letter is None)})

    def answer(self, text: str) -> str | None:
        """Return the letter that the text answers with, as a capital of ours."""
        text = text.rpartition(THOUGHT_ENDS)[2]
        pieces = range(0, len(text), NORMALIZED_AT_ONCE)
        text = "".join(unicodedata.normalize("NFKC", text[i : i + NORMALIZED_AT_ONCE]) for i in pieces)  # Ａ is A
        said = self._said.findall(WRAPPING.sub("", BOXED.sub(self._unboxed, text)))
        if said := [letter for colon, letter in said if colon or not letter.islower()]:  # "the answer is a bit unclear"
            return self._ours(said[-1])
        return self._letter_of(text)

    def _unboxed(self, box: re.Match[str]) -> str:
        """Return a letter in a box as one that is said, so that one search finds both, in the order of the text."""
        letter = self._letter_of(box[1])
        return f"\nAnswer: {letter}\n" if letter else box[0]

    def _letter_of(self, text: str) -> str | None:
        found = self._alone.fullmatch(WRAPPING.sub("", text))
        return self._ours(found[1]) if found else None

    def _ours(self, letter: str) -> str:
        return self._foreign.get(letter, letter.upper())
