"""IFEval's rules give the results of lm-evaluation-harness, and those that a reader of the instruction expects."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.config import EnvironmentConfig
from pipeline.environments.build_environments import build
from pipeline.environments.environment import Unjudged
from pipeline.environments.ifeval import judge_instructions, read_instructions, variants
from pipeline.environments.ifeval_rules import RULES
from pipeline.environments.ifeval_text import TextAnalysis, count_capital_words, count_sentences
from pipeline.evaluation.formats.instruction_following import IFEvalPrompts
from pipeline.recipe.problems import RecipeError
from pipeline.types import Prompt
from tests.environments.ifeval_golden import FILE, RESPONSES

GOLDEN = json.loads(FILE.read_text())
OF_LANGUAGES = {"language:response_language", "change_case:english_capital", "change_case:english_lowercase"}
DIFFERENT = {
    ("length_constraints:number_sentences", "12345 67890 !!! ???"): "Punkt takes each mark that stands alone for a sentence",
    ("length_constraints:number_words", RESPONSES[-1]): "NLTK 3.10 counts the vowel signs of Hindi as letters",
}
"""(instruction, response) -> why the results differ."""


def analysis():
    """Return what needs no package."""
    return SimpleNamespace(count_sentences=count_sentences, detect=None)


def analysis_with_languages() -> TextAnalysis:
    pytest.importorskip("langdetect")
    return TextAnalysis()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in OF_LANGUAGES else ()) for name in RULES])
def test_results_equal_those_of_lm_evaluation_harness(name: str):
    tools = analysis_with_languages() if name in OF_LANGUAGES else analysis()
    results = set()
    for golden_name, arguments, strict, loose in GOLDEN:
        if golden_name != name:
            continue
        for response, digits in zip(RESPONSES, zip(strict, loose, strict=True), strict=True):
            found = (
                judge_instructions([(name, arguments)], [response], tools)[0],
                judge_instructions([(name, arguments)], variants(response), tools)[0],
            )
            if (name, response) not in DIFFERENT:
                assert found == (digits[0] == "1", digits[1] == "1"), (arguments, response)
            results.add(found)
    assert {(True, True), (False, False)} <= results  # else the cases show nothing


def test_every_rule_has_golden_results():
    assert {name for name, *_ in GOLDEN} == set(RULES) and len(RULES) == 25
    assert sum(len(strict) for *_, strict, _ in GOLDEN) > 7000


@pytest.mark.parametrize(
    ("name", "arguments", "right", "wrong"),
    [
        ("keywords:existence", {"keywords": ["Fox", "c("]}, "A fox: c(1).", "A fox in C."),
        ("keywords:frequency", {"keyword": "no", "frequency": 2, "relation": "less than"}, "Yes, no.", "No, no."),
        ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "Concatenate.", "A Cat."),
        ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, "#a #b", "#a"),
        (
            "length_constraints:number_sentences",
            {"num_sentences": 2, "relation": "at least"},
            "Mr. A. Bo ran. He won.",
            "Mr. Bo ran.",
        ),
        ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one, two"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "So"},
            "a b\n\nso, c",
            "so\n\nc",
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a] (b)"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "a\nP.S. b", "a\nPS b"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
        ("detectable_format:constrained_response", {}, "My answer is no.", "no"),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a*"),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "Part", "num_sections": 2},
            "Part 1 a Part 2 b",
            "Part one, Part 2",
        ),
        ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
        ("detectable_format:title", {}, "<<Title>>\ntext", "<Title>\ntext"),
        ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi. "}, "SAY HI. Hi!", "Hi! Say hi."),
        ("startend:end_checker", {"end_phrase": "Bye!"}, 'So long. bye!"', "Bye! Really."),
        ("startend:quotation", {}, ' "a" ', '"a'),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 2, "capital_relation": "less than"},
            "NATO and Otan",
            "I AM",
        ),
        ("punctuation:no_comma", {}, "a; b", "a, b"),
    ],
)
def test_hand_made_cases(name: str, arguments: dict, right: str, wrong: str):
    assert judge_instructions([(name, arguments)], [right], analysis()) == [True]
    assert judge_instructions([(name, arguments)], [wrong], analysis()) == [False]
    assert judge_instructions([(name, arguments)], ["", " \n"], analysis()) == [False]  # an empty answer follows nothing


def test_the_variants_of_a_loose_check():
    assert variants("a\n*b*\nc") == ["a\n*b*\nc", "*b*\nc", "a\n*b*", "*b*", "a\nb\nc", "b\nc", "a\nb", "b"]
    assert variants("a") == ["a", "", "", "", "a", "", "", ""]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("a", 1),
        ("A. B", 1),
        ("One. Two.", 2),
        ("One? Two! three.", 3),
        ("Dr. Bo left. Mrs. Y stayed.", 2),
        ("Wait... no.", 1),
        ("Wait... No.", 2),
        ("At 5 p.m. we left.", 1),
        ("In the U.S. The end.", 2),
        ("1. Buy. 2. go.", 3),
        ("3.14 is pi. Yes.", 2),
        ('He said "Go." Then left.', 2),
        ("(Really.) Yes.", 2),
        ("One.\n\nTwo.\n", 2),
        ("a\nb\nc", 1),
        ("See a.b.c for more. Ok", 2),
        ("What?! Yes!!!", 2),
        ("Inc. They rose.", 2),
        ("Plan B. The end.", 2),
    ],
)
def test_sentences(text: str, count: int):
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("Hello", 0),
        ("NASA", 1),
        ("I AM", 2),
        ("I'm OK", 2),
        ("DON'T", 2),
        ("JOHN'S", 2),
        ("A/B", 1),
        ("A-B", 1),
        ("U.S.A.", 1),
        ("AT&T", 2),
        ("WORD--WORD", 2),
        ("WORD\u2014WORD", 2),
        ("5PM", 1),
        ("10:30AM", 1),
        ("123", 0),
        ("*BOLD*", 1),
        ("[NAME]", 1),
        ("GONNA", 2),
        ("NOTE:THIS", 2),
        ("\u201cYES\u201d", 1),
        ("OK...OK", 2),
    ],
)
def test_words_in_capitals(text: str, count: int):
    assert count_capital_words(text) == count


# ---- the environment and the format ------------------------------------------------------------------------------------------


RECORD = {
    "key": 1000,
    "prompt": "Write two words without a comma, in bullets.",
    "instruction_id_list": ["punctuation:no_comma", "detectable_format:number_bullet_lists"],
    "kwargs": [{"num_bullets": None, "relation": None}, {"num_bullets": 2, "relation": None}],
}


def judged(text: str, record: dict = RECORD, **kwargs):
    pytest.importorskip("langdetect")
    environment = build({"if": EnvironmentConfig(kind="ifeval", kwargs=kwargs)})["if"]
    question = IFEvalPrompts(None).question(record, 0)
    return environment.step(Prompt(4, np.zeros(1, np.int32), "if", question.task), text)


def test_prompts_and_instructions_strict_and_loose():
    right = judged("* one\n* two")
    assert right.reward == 1.0 and right.metrics == {
        **{f"{level}_{way}": 1.0 for level in ("prompt", "instruction") for way in ("strict", "loose")},
        "instructions": 2.0,
        "unparsed": 0.0,
    }
    polite = judged("Sure, here they are:\n* one\n* two")
    assert (polite.reward, polite.metrics["prompt_loose"], polite.metrics["instruction_strict"]) == (0.0, 1.0, 0.5)
    assert judged("Sure, here they are:\n* one\n* two", reward="loose").reward == 1.0
    assert judged("* one, two", reward="share").reward == 0.0
    assert judged("* one", reward="share").reward == 0.5
    assert judged(" ").metrics["unparsed"] == 1.0


@pytest.mark.parametrize(
    ("names", "kwargs", "message"),
    [
        (["punctuation:no_dots"], [{}], "got instruction 'punctuation:no_dots'"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": None}], "got no arguments; expected num_bullets"),
        (["punctuation:no_comma"], [{"num_bullets": 1}], "expected no arguments"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1, "relation": "exactly"}], "got relation='exactly'"),
    ],
)
def test_instructions_that_cannot_be_read(names: list[str], kwargs: list[dict], message: str):
    with pytest.raises(ValueError, match=message):
        read_instructions(json.dumps({"instruction_id_list": names, "kwargs": kwargs}))
    record = {**RECORD, "instruction_id_list": names, "kwargs": kwargs}
    IFEvalPrompts(None).question(record, 0)
    with pytest.raises(Unjudged, match="prompt 4: "):
        judged("text", record)


def test_a_record_without_arguments_for_each_instruction():
    with pytest.raises(ValueError, match="got 2 instructions and 1 kwargs"):
        IFEvalPrompts(None).question({**RECORD, "kwargs": [{}]}, 0)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "langdetect", None)
    with pytest.raises(RecipeError, match=r"pip install langdetect==1\.0\.9"):
        build({"if": EnvironmentConfig(kind="ifeval")})


def test_punkt_counts_as_lm_evaluation_harness():
    nltk = pytest.importorskip("nltk")
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        pytest.skip("NLTK's data punkt_tab is not installed")
    tools = SimpleNamespace(count_sentences=TextAnalysis("punkt").count_sentences)
    for name, arguments, strict, _ in GOLDEN:
        if name == "length_constraints:number_sentences":
            assert "".join("01"[judge_instructions([(name, arguments)], [one], tools)[0]] for one in RESPONSES) == strict
