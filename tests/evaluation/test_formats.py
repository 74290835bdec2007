"""Questions of each format from records with the real columns, and the suites that name them."""

from pathlib import Path

import pytest

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.config import RECIPES, inspect
from pipeline.evaluation import task_data
from pipeline.evaluation.questions import Question
from pipeline.evaluation.task_data import TaskData
from tests.evaluation.sample_records import RECORDS, write

MATH = ("gsm8k", "minerva_math", "math500", "aime24", "aime25")


def task(name: str, folder: Path) -> TaskConfig:
    suite = "math" if name in MATH else "science"
    overrides = ["policy.model_name=m", "name=n", f"run_dir={folder}", *write(folder, (name,))]
    loaded = inspect(str(RECIPES / "suites" / f"{suite}.yaml"), overrides)
    return loaded.recipe.evaluate.tasks[name]


def read(name: str, folder: Path) -> TaskData:
    return task_data.read(name, task(name, folder))


def only(name: str, folder: Path) -> Question:
    return read(name, folder).questions[0]


def test_every_task_of_the_suites_reads_its_records(tmp_path: Path):
    for name, splits in RECORDS.items():
        found = read(name, tmp_path)
        split = task(name, tmp_path).data.split
        assert len(found.questions) == sum(len(rows) for path, rows in splits.items() if path.split("/")[-1] == split)
        assert len({question.id for question in found.questions}) == len(found.questions)
        for question in found.questions:
            assert set(question.task) == {"answer"} and question.task["answer"] and question.target.strip()
            assert "{" not in question.description + str(question.prompt).replace("\\boxed{}", "").replace("{}", "")


def test_gsm8k_is_asked_as_lm_evaluation_harness_asks(tmp_path: Path):
    found = read("gsm8k", tmp_path)
    question = found.questions[0]
    assert question.prompt == "Question: Tom has 0 apples and gets 2. How many?\nAnswer:"
    assert (question.target[-6:], question.task) == ("#### 2", {"answer": "2"})
    assert question.target.startswith(" He has 0")
    assert {len(examples) for examples in found.examples.values()} == {5}


def test_minerva_has_its_own_examples_and_the_answer_of_the_last_box(tmp_path: Path):
    found = read("minerva_math", tmp_path)
    assert found.questions[0].task == {"answer": "\\frac{4}{2}"}
    assert [question.group for question in found.questions[:2]] == ["Algebra", "Counting And Probability"]
    assert {len(examples) for examples in found.examples.values()} == {4}
    first, *_, last = found.examples[found.questions[3].id]
    assert "domain of the expression" in first.prompt and last.target.endswith("$-\\frac{2}{3}$. I hope it is correct.")


def test_problems_have_their_own_ids_and_subjects(tmp_path: Path):
    question = only("math500", tmp_path)
    assert (question.id, question.group) == ("test/Precalculus/0.json", "Precalculus")
    assert question.prompt.endswith("\nPlease reason step by step, and put your final answer within \\boxed{}.")
    assert (only("aime24", tmp_path).id, only("aime24", tmp_path).task) == ("2024-I-0", {"answer": "0"})
    assert only("aime25", tmp_path).id == "0"


def test_choices_of_gpqa_are_shuffled_the_same_in_every_run(tmp_path: Path):
    first, again = read("gpqa_diamond", tmp_path).questions, read("gpqa_diamond", tmp_path).questions
    assert first == again and len({question.task["answer"] for question in first}) > 1
    for question in first:
        assert f"\n{question.task['answer']}) the right one. here" in question.prompt
        assert "LETTER is one of ABCD." in question.prompt and "wrong 3" in question.prompt
    assert (first[0].id, first[0].group, first[1].group) == ("rec0", "Physics", "Chemistry")


def test_mmlu(tmp_path: Path):
    question = only("mmlu", tmp_path)
    assert question.prompt.endswith("\n\nanatomy: 0?\n\nA) one\nB) two\nC) three\nD) four")
    assert (question.group, question.task) == ("anatomy", {"answer": "A"})


def test_mmlu_pro_has_examples_of_the_questions_category_with_reasons(tmp_path: Path):
    found = read("mmlu_pro", tmp_path)
    question = found.questions[1]
    examples = found.examples[question.id]
    assert len(examples) == 5 and {example.group for example in examples} == {"law"} == {question.group}
    assert examples[2].target == " It is 2. The answer is (C)."
    assert question.prompt.startswith("Question:\nWhich number is 1 in law?\nOptions:\nA. 0\nB. 1\n")
    assert question.prompt.endswith("\nJ. 9\nAnswer: Let's think step by step.")
    assert question.description.startswith("The following are multiple choice questions (with answers) about law. Think")
    assert question.task == {"answer": "B"}


def test_labels_of_arc_become_letters(tmp_path: Path):
    found = read("arc_challenge", tmp_path)
    assert [question.task["answer"] for question in found.questions] == ["A", "A", "A"]
    assert found.questions[1].prompt.endswith("A) ice\nB) fire\nC) steam\nD) lava")
    assert "one of ABC." in found.questions[2].prompt and found.questions[2].id == "Mercury_2"


@pytest.mark.parametrize(
    ("format", "record", "message"),
    [
        ("gsm8k", {"question": "1+1?", "answer": "2"}, "no ####"),
        ("gsm8k", {"problem": "1+1?", "answer": "#### 2"}, "has no 'question'; it has: problem, answer"),
        ("minerva_math", {"problem": "1+1?", "solution": "\\boxed{2"}, "no .boxed"),
        ("mmlu_generative", {"question": "?", "choices": ["a"], "answer": 1}, "got choice 2 as the answer; expected 1 to 1"),
        ("arc_generative", {"question": "?", "choices": {"label": ["A"], "text": ["a"]}, "answerKey": "B"}, "labels A"),
        ("math500", {"problem": "1+1?", "answer": [2]}, "'answer' is a list"),
        ("mmlu_generative", {"question": "?", "choices": 3, "answer": 1, "subject": "x"}, "does not fit the format: TypeError"),
        ("arc_generative", {"question": "?", "choices": ["a"], "answerKey": "A"}, "does not fit the format: TypeError"),
    ],
)
def test_records_that_are_not_of_the_format(format: str, record: dict, message: str):
    form = task_data.load_format("evaluate.tasks.x", TaskConfig(format=format))
    with pytest.raises(ValueError, match=message):
        task_data.to_question(form, record, 0)
