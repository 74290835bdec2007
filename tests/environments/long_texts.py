"""Judge texts of 200,000 characters, which searches of quadratic time do not finish within a limit of CPU time.

`python -m tests.environments.long_texts` judges each one's worst texts, and with `all` all texts.
"""

import functools
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.environments import (
    code,
    code_extraction,
    gsm8k,
    ifeval,
    ifeval_rules,
    ifeval_text,
    minerva_math,
    numpy_stand_in,
    verdicts,
)
from pipeline.environments.multiple_choice import MultipleChoice, MultipleChoiceArguments

CHARACTERS = 200_000
CPU_S = 30  # linear searches take 2 s, or 9 s of all texts; a quadratic one of a single text takes minutes
UNITS = (
    *(
        ".",
        "!",
        "e. ",
        "a.:",
        "1.",
        " e.",
        "[",
        "<",
        "\n",
        " ",
        "\n-",
        "* ",
        "#### ",
        "$",
        "1",
        "\\boxed{",
        "\\boxed a",
        "sqrt[",
    ),
    *("Final Answer: The final answer is ", "```\n", "Answer: ", "a", "\u0327\u0301", "{", "\\text{"),
)


class Counts:
    """What IFEval's rules ask of a text but for its language, whose detection needs another package."""

    count_sentences = staticmethod(ifeval_text.count_sentences)

    def detect(self, text: str) -> str:
        return "en"


def judges() -> Iterator[tuple[Callable[[str], Any], tuple[str, ...]]]:
    """Yield a judge and the parts that its worst texts repeat."""
    values = {"num_sentences": 2, "num_words": 2, "num_paragraphs": 2, "num_placeholders": 1, "postscript_marker": "P.P.S"}
    values |= {"capital_frequency": 1, "num_bullets": 1, "num_highlights": 1, "section_spliter": "Section", "num_sections": 1}
    values |= dict.fromkeys(("relation", "capital_relation", "let_relation"), "at least")
    worst = {
        "number_sentences": (".", "x.:", " e."),
        "number_placeholders": ("[",),
        "number_bullet_lists": ("\n",),
        "title": ("<",),
    }
    for name in ifeval_rules.RULES:
        taken = ifeval_rules._parameters(ifeval_rules.RULES[name])
        if set(taken) <= set(values):
            arguments = {key: values[key] for key in taken}
            follows = functools.partial(ifeval_rules.RULES[name], **arguments)
            yield lambda text, follows=follows: follows(text, Counts()), worst.get(name.partition(":")[2], ())
    yield ifeval.variants, ()
    yield lambda text: gsm8k.normalize(text) and gsm8k.FLEXIBLE.findall(text), (".",)
    yield lambda text: minerva_math.final_answer(f"{minerva_math.BEGIN} {text}. I hope it is correct."), ("a", "sqrt[")
    yield minerva_math.final_answer, (f"{minerva_math.BEGIN} ",)
    yield minerva_math.last_box, ("\\boxed{",)
    yield code.code_in, ("```\n",)
    yield numpy_stand_in.can_stand_in, ("\n",)
    yield lambda text: code_extraction.find_code(f"a{text}", "blocks", "f", ""), ("\u0327\u0301",)
    yield lambda text: verdicts.read_rating(f"Rating{text}x"), (" ",)
    yield from ((MultipleChoice(MultipleChoiceArguments(kind), None).answer, ()) for kind in VERIFIERS)


VERIFIERS: tuple[Any, ...] = ("english_multichoice", "multilingual_multichoice")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    for judge, worst in judges():
        for unit in UNITS if "all" in sys.argv else worst:
            judge(unit * (CHARACTERS // len(unit)) + "x")


if __name__ == "__main__":
    sys.exit(main())
