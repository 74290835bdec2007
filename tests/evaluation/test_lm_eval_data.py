"""Tasks of lm-evaluation-harness on a suite's own data: which records are asked, and what is kept of their answers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from transformers import AutoTokenizer

from pipeline.algorithms.evaluate import HARNESS_KINDS, LmEvalConfig, TaskConfig
from pipeline.config import RECIPES, inspect
from pipeline.evaluation import lm_eval_documents, scores, task_data
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.lm_eval_model import EnginesLM
from pipeline.evaluation.lm_eval_tasks import HarnessRun, HarnessTask
from pipeline.evaluation.questions import Answer
from pipeline.evaluation.statistics import interval
from pipeline.types import Likelihood
from tests.evaluation.likelihood_data import recipe, records, save_model, task_config, write_jsonl
from tests.problems import refused

KEY = "evaluate.tasks.it"


class ModuloEngines:
    """Gives each token the log-prob -(token % 7); even tokens are greedy."""

    def likelihoods(self, units: Any):
        for place, unit in enumerate(units):
            ends = [request.tokens[request.first :] for request in unit]
            yield place, [Likelihood("", -(end % 7).astype(np.float32), end % 2 == 0) for end in ends]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a model whose tokenizer begins each text with <s>."""
    return save_model(tmp_path_factory.mktemp("model"), "llama", 256)


def ask(folder: Path, path: Path, config: TaskConfig, longest: int = 256, include: Path | None = None) -> HarnessRun:
    settings = recipe(folder, "transformers", longest)
    settings.evaluate.tasks = {"it": config}
    settings.evaluate.lm_eval.include_path = include and str(include)
    run = HarnessRun(settings, AutoTokenizer.from_pretrained(folder))
    run.ask(ModuloEngines(), AnswerLog(path, run.name))  # pyright: ignore[reportArgumentType]
    return run


def build(config: TaskConfig) -> lm_eval_documents.Documents:
    return lm_eval_documents.build("it", config, lm_eval_documents.manager([config.format], None))


# ---- records ---------------------------------------------------------------------------------------------------------------


def test_the_questions_are_those_of_the_data(tmp_path: Path):
    """With the ids and the draws of any other task, so that comparisons with earlier evaluations pair them."""
    config = task_config("hellaswag", write_jsonl(tmp_path / "h.jsonl", records("hellaswag", 20)), max_samples=7)
    documents, read = build(config), task_data.read("it", config)
    asked = documents.tasks["hellaswag"].asked
    assert list(asked.values()) == [question.index for question in read.questions]
    assert [question.id for question in documents.questions.values()] == [question.id for question in read.questions]


def test_a_group_divides_the_records_by_subject(folder: Path, tmp_path: Path):
    for split, count in (("test", 9), ("dev", 12)):
        write_jsonl(tmp_path / f"{split}.jsonl", records("mmlu", count, seed=count))
    run = ask(folder, tmp_path, task_config("mmlu", tmp_path, num_few_shot=2, few_shot_split="dev"))
    tasks = ("mmlu_abstract_algebra", "mmlu_high_school_us_history", "mmlu_virology")
    assert set(run.documents["it"].tasks) == set(tasks)
    summary = scores.summarize(recipe_named(run), run.tasks())["tasks"]["it"]
    assert set(summary["groups"]) == {"abstract_algebra", "high_school_us_history", "virology"}
    assert summary["questions"] == 9 and summary["metric"] == "acc" and "macro" in summary
    examples = [row for row in records("mmlu", 12, seed=12) if row["subject"] == "virology"]
    (prompt, *_) = [answer.prompt for answer in run.answers["it"] if answer.group == "virology"]
    assert prompt.startswith("The following are multiple choice questions (with answers) about virology.")
    assert prompt.count("Answer:") == 3 and prompt.index(examples[0]["question"].strip()) < prompt.rindex("D. ")


def recipe_named(run: HarnessRun) -> Any:
    settings: Any = run._recipe
    settings.name = "suite"
    return settings


def test_examples_of_the_questions_own_split_leave_it_out(folder: Path, tmp_path: Path):
    rows = [{"goal": f"goal {i}", "sol1": "a", "sol2": "b", "label": 0} for i in range(4)]
    run = ask(folder, tmp_path, task_config("piqa", write_jsonl(tmp_path / "p.jsonl", rows), num_few_shot=3))
    assert len(run.answers["it"]) == 4
    for i, answer in enumerate(run.answers["it"]):
        assert answer.prompt.count("goal") == 4 and answer.prompt.count(f"goal {i}") == 1


@pytest.mark.parametrize("kind", HARNESS_KINDS)
def test_earlier_names_of_the_kind_and_of_formats(tmp_path: Path, kind: str):
    config = task_config("arc", write_jsonl(tmp_path / "arc.jsonl", records("arc", 3)), kind=kind, format="arc")
    assert list(build(config).tasks) == ["arc_easy"]


@pytest.mark.parametrize(
    ("form", "bad", "message"),
    [
        ("piqa", {"goal": "g", "sol1": "a", "sol2": "b", "label": -1}, "got -1 as the index of the right choice"),
        ("piqa", {"goal": "g", "sol1": "a", "label": 1}, "has no 'sol2', which the first record has"),
        ("arc", {"id": "", "question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "B"}, "not in list"),
        ("documents", {"text": ""}, "has no text to score"),
        ("hellaswag", {**records("hellaswag", 1)[0], "ctx_b": None}, "AttributeError: 'NoneType' object"),
        ("piqa", {"goal": "g", "sol1": "a", "sol2": 5, "label": 1}, "got 5 as a choice"),
        ("piqa", {"goal": ["g"], "sol1": "a", "sol2": None, "label": 1}, "got None as a choice"),
    ],
)
def test_bad_records_are_named_or_dropped(tmp_path: Path, form: str, bad: dict, message: str):
    path = write_jsonl(tmp_path / "rows.jsonl", [*records(form, 3), bad])
    with refused((f"{KEY}.data", "bad-record")) as error:
        build(task_config(form, path))
    assert "rows.jsonl:4" in str(error.value) and message in str(error.value)
    documents = build(task_config(form, path, bad_records="drop"))
    assert documents.dropped.count == 1 and len(documents.questions) == 3


@pytest.mark.parametrize("form", ["hellaswag", "piqa"])
def test_bad_records_are_no_examples(folder: Path, tmp_path: Path, form: str):
    """The examples come from the split of the questions, then from another split. The first record of each split is bad."""
    good, bad = records(form, 4), {**records(form, 1)[0], "label": "-1" if form == "piqa" else None}
    for split in ("test", "train"):
        write_jsonl(tmp_path / f"{split}.jsonl", [bad, *good])
    for split in (None, "train"):
        config = task_config(form, tmp_path, num_few_shot=3, few_shot_split=split, bad_records="drop")
        assert len(ask(folder, tmp_path / str(split), config).answers["it"]) == 4
        config.num_few_shot = 4 + (split is not None)
        with refused((f"{KEY}.num_few_shot", "too-large")):
            build(config)
    config = task_config("hellaswag", tmp_path, num_few_shot=1, few_shot_split="train", max_samples=1)
    if form == "hellaswag":
        with refused((f"{KEY}.data", "bad-record")) as error:
            build(config)
        assert ".jsonl:1 does not fit" in str(error.value)


def test_a_task_reads_its_documents_once(tmp_path: Path, monkeypatch):
    calls, process = [], Dataset.map
    monkeypatch.setattr(Dataset, "map", lambda self, *args, **options: calls.append(1) or process(self, *args, **options))
    path = write_jsonl(tmp_path / "rows.jsonl", records("hellaswag", 30))
    assert len(build(task_config("hellaswag", path)).questions) == 30 and len(calls) == 1
    assert len(build(task_config("hellaswag", path, num_few_shot=2)).questions) == 30 and len(calls) == 2


@pytest.mark.parametrize("split", [None, "train"])
def test_examples_do_not_depend_on_max_samples(folder: Path, tmp_path: Path, split: str | None):
    """They are the harness's own draws of all documents."""
    for name in ("test", "train"):
        write_jsonl(tmp_path / f"{name}.jsonl", records("piqa", 12, seed=len(name)))
    answers = []
    for most in (None, 3, 7):
        config = task_config("piqa", tmp_path, num_few_shot=2, few_shot_split=split, max_samples=most)
        run = ask(folder, tmp_path / str(most), config, longest=1024)
        answers.append({answer.question: answer.prompt for answer in run.answers["it"]})
    whole, *parts = answers
    assert [len(prompts) for prompts in answers] == [12, 3, 7]
    assert all(prompts.items() <= whole.items() for prompts in parts)
    (task,) = build(task_config("piqa", tmp_path, num_few_shot=2, few_shot_split=split)).tasks.values()
    task.set_fewshot_seed(1234)
    documents = list(task.task_docs)
    assert list(whole.values()) == [ConfigurableTask.fewshot_context(task, document, 2) for document in documents]


def test_subjects_that_a_group_does_not_have(tmp_path: Path):
    rows = records("mmlu", 6)
    rows[1]["subject"] = rows[4]["subject"] = "company_policy"
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with refused((f"{KEY}.data", "bad-record")) as error:
        build(task_config("mmlu", path))
    assert "rows.jsonl:2: ValueError: got 'company_policy' in 'subject'; expected one of abstract" in str(error.value)
    documents = build(task_config("mmlu", path, bad_records="drop"))
    assert documents.dropped.count == 2 and len(documents.questions) == 4


def test_records_of_another_benchmark(tmp_path: Path):
    path = write_jsonl(tmp_path / "rows.jsonl", records("piqa", 3))
    with refused((f"{KEY}.data", "bad-record")) as error:
        build(task_config("hellaswag", path))
    assert "rows.jsonl:1 does not fit lm-evaluation-harness's task hellaswag: KeyError" in str(error.value)
    write_jsonl(path, [{**row, "subject": "cooking"} for row in records("mmlu", 3)])
    with refused((f"{KEY}.data", "bad-record")) as error:
        build(task_config("mmlu", path))
    assert "rows.jsonl:1: ValueError: got 'cooking' in 'subject'; expected one of abstract_algebra" in str(error.value)


def test_too_few_examples(tmp_path: Path):
    for split in ("test", "train"):
        write_jsonl(tmp_path / f"{split}.jsonl", records("piqa", 3))
    for split, count in ((None, 3), ("train", 4)):
        with refused((f"{KEY}.num_few_shot", "too-large")):
            build(task_config("piqa", tmp_path, num_few_shot=count, few_shot_split=split))


def test_a_metric_that_a_task_does_not_have_is_refused(tmp_path: Path):
    with refused((f"{KEY}.metric", "not-a-choice")) as error:
        build(task_config("piqa", write_jsonl(tmp_path / "p.jsonl", records("piqa", 2)), metric="accuracy"))
    assert "expected a metric of piqa: acc, acc_norm, acc_bytes" in str(error.value)


def test_unknown_tasks_and_classes_are_refused(tmp_path: Path):
    config = task_config("piqa", write_jsonl(tmp_path / "p.jsonl", records("piqa", 2)))
    config.format = "piqua"
    with refused((f"{KEY}.format", "not-a-choice")):
        build(config)
    suite = RECIPES / "suites/commonsense.yaml"
    overrides = ["policy.model_name=m", "name=n", f"run_dir={tmp_path}", "evaluate.tasks.piqa.format=my.Riddles"]
    (problem,) = [problem for problem in inspect(str(suite), overrides).problems if problem.code == "not-a-choice"]
    assert problem.key == "evaluate.tasks.piqa.format" and "include_path" in problem.message


@pytest.mark.parametrize(
    ("overrides", "key", "code"),
    [
        (["evaluate.tasks.piqa.temperature=0.5"], "evaluate.tasks.piqa.temperature", "has-no-effect"),
        (["evaluate.tasks.piqa.pass_at=[1]"], "evaluate.tasks.piqa.pass_at", "has-no-effect"),
        (["evaluate.tasks.lm_eval.kind=preference"], "evaluate.tasks.lm_eval", "contradiction"),
        (["evaluate.lm_eval.tasks=[piqa]"], "evaluate.lm_eval.tasks", "contradiction"),
    ],
)
def test_submission_refuses(tmp_path: Path, overrides: list[str], key: str, code: str):
    given = ["policy.model_name=m", "name=n", f"run_dir={tmp_path}"]
    before = {problem.key for problem in inspect(str(RECIPES / "suites/commonsense.yaml"), given).problems}
    problems = inspect(str(RECIPES / "suites/commonsense.yaml"), [*given, *overrides]).problems
    assert (key, code) in {(problem.key, problem.code) for problem in problems} and key not in before


# ---- answers ---------------------------------------------------------------------------------------------------------------


def test_answers_say_what_was_scored(folder: Path, tmp_path: Path):
    rows = [{"goal": "g", "sol1": "the river", "sol2": "stone", "label": 1}]
    run = ask(folder, tmp_path, task_config("piqa", write_jsonl(tmp_path / "p.jsonl", rows), metric="acc_norm"))
    (answer,) = run.answers["it"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = len(tokenizer("Question: g\nAnswer:").input_ids)
    ends = [np.array(tokenizer(f"Question: g\nAnswer: {text}").input_ids[before:]) for text in ("the river", "stone")]
    assert answer.details["logprobs"] == [float(-(end % 7).sum()) for end in ends]
    assert answer.details["greedy"] == [bool((end % 2 == 0).all()) for end in ends]
    assert answer.prompt == "Question: g\nAnswer:" and answer.details["choices"] == [" the river", " stone"]
    assert answer.text == ("the river", "stone")[int(np.argmax(answer.details["logprobs"]))]
    assert answer.metrics.keys() == {"acc", "acc_norm", "acc_bytes"} and answer.score == answer.metrics["acc_norm"]
    task, answers = run.tasks()["it"]
    assert task.metrics(answers)["acc"] == {answer.question: [answer.metrics["acc"]]}
    run.write(tmp_path)
    assert json.loads((tmp_path / "answers/it.jsonl").read_text())["question"] == answer.question
    assert not (tmp_path / "lm_eval_results.json").exists()


def test_perplexity_of_ones_own_texts(folder: Path, tmp_path: Path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"body": "the river is old " * count} for count in (1, 9, 200)])
    run = ask(folder, tmp_path, task_config("documents", path, format_kwargs={"text_key": "body"}))
    task, answers = run.tasks()["it"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["body"] for line in path.read_text().splitlines()]
    nats = sum(int((np.array(tokenizer(text).input_ids) % 7).sum()) for text in texts)
    (metric, bits), *others = task.metrics(answers).items()
    assert metric == "bits_per_byte" and {name for name, _ in others} == {"byte_perplexity", "word_perplexity"}
    assert interval(bits.values()).value == pytest.approx(nats / sum(len(text) for text in texts) / math.log(2))


def test_texts_of_a_recipe_and_of_documents_are_no_code(folder: Path, tmp_path: Path):
    path = write_jsonl(tmp_path / "p.jsonl", records("piqa", 2))
    (answer, _) = ask(folder, tmp_path / "a", task_config("piqa", path, answer_prefix="{{ 7 * 7 }} {% if %}")).answers["it"]
    assert answer.prompt.endswith("\nAnswer: {{ 7 * 7 }} {% if %}")
    write_jsonl(path, [{"text": "[1, 2]"}, {"text": "{{ 7 * 7 }}"}])
    for config in (task_config("documents", path), task_config("documents", path, format_kwargs={"text_key": "text"})):
        assert [answer.prompt for answer in ask(folder, tmp_path / "b", config).answers["it"]] == ["[1, 2]", "{{ 7 * 7 }}"]
    with refused((f"{KEY}.data", "bad-record")):
        build(task_config("documents", path, format_kwargs={"text_key": "cycler.__init__"}))


def test_a_name_is_given_once(folder: Path, tmp_path: Path):
    settings = recipe(folder, "transformers", 64)
    settings.evaluate.tasks = {"piqa": task_config("piqa", write_jsonl(tmp_path / "p.jsonl", records("piqa", 2)))}
    settings.evaluate.tasks["mmlu_anatomy"] = TaskConfig(kind="generate")
    settings.evaluate.lm_eval.tasks = ["piqa", "mmlu"]
    with refused(("evaluate.lm_eval.tasks", "contradiction")) as error:
        HarnessRun(settings, AutoTokenizer.from_pretrained(folder))
    assert "got mmlu_anatomy, piqa, which evaluate.tasks has too" in str(error.value)


def test_texts_that_are_too_long_are_counted_or_refused(folder: Path, tmp_path: Path):
    rows = [*records("piqa", 6), {"goal": "river " * 150, "sol1": "a", "sol2": "b", "label": 0}]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    task, _ = ask(folder, tmp_path, task_config("piqa", path), longest=120).tasks()["it"]
    (warning,) = task.warnings
    assert warning.startswith("2 of 14 texts have more than 120 tokens and lose their first tokens. Try policy.max_total")
    write_jsonl(path, [{"goal": "g", "sol1": "a", "sol2": "river " * 130, "label": 0}])
    with refused((f"{KEY}.data", "bad-record")) as error:
        ask(folder, tmp_path, task_config("piqa", path), longest=120)
    assert "expected 1 to 119" in str(error.value)


def test_the_pages_task_is_asked_with_its_own_data_and_with_a_suites(folder: Path, tmp_path: Path):
    page = Path(lm_eval_documents.__file__).with_name("LIKELIHOOD.md").read_text()
    record = {"riddle": "What runs?", "answers": ["river", "stone"], "right": 0, "subject": "x"}
    path = write_jsonl(tmp_path / "r.jsonl", [record])
    text = page.partition("```yaml\n")[2].partition("```")[0].replace("/data/riddles.jsonl", str(path))
    (tmp_path / "riddles.yaml").write_text(text)
    config = task_config("riddles", path)
    (answer,) = ask(folder, tmp_path / "run", config, include=tmp_path).answers["it"]
    assert (answer.prompt, answer.details["choices"], answer.group) == ("What runs?", [" river", " stone"], "x")
    settings = recipe(folder, "transformers", 256)
    settings.evaluate.tasks = {}
    settings.evaluate.lm_eval = LmEvalConfig(["riddles"], include_path=str(tmp_path))
    run = HarnessRun(settings, AutoTokenizer.from_pretrained(folder))
    run.ask(ModuloEngines(), AnswerLog(tmp_path / "own", run.name))  # pyright: ignore[reportArgumentType]
    (answer,) = run.answers["riddles"]
    assert answer.details["choices"] == [" river", " stone"]


def test_a_task_that_cannot_be_built_is_named(tmp_path: Path):
    (tmp_path / "far.yaml").write_text(f"task: far\ndataset_path: {tmp_path}/nothing\ntest_split: test\n")
    with refused(("evaluate.lm_eval.tasks", "unavailable-dataset")) as error:
        lm_eval_documents.manager(["far"], str(tmp_path)).load(["far"])
    assert "got far; lm-evaluation-harness cannot load them: FileNotFoundError: " in str(error.value)


def answer(question: str, metric: str, *nats: float) -> Answer:
    return Answer(question, 0, 0.0, details={"nats": {metric: nats}})


def test_perplexity_is_of_all_texts_together():
    task = HarnessTask("it", TaskConfig(kind="lm_eval"))
    for metric, expected in (("bits_per_byte", 30 / 12 / math.log(2)), ("byte_perplexity", math.exp(30 / 12))):
        answers = [answer("a", metric, -10.0, 8), answer("b", metric, -20.0, 4)]
        assert interval(task.metrics(answers)[metric].values()).value == pytest.approx(expected)
    # The interval is that of a quotient: it has no width where each text has the same perplexity, however long it is.
    even = [answer("a", "bits_per_byte", -10.0, 5), answer("b", "bits_per_byte", -20.0, 10)]
    bits = interval(task.metrics(even)["bits_per_byte"].values())
    assert bits.low == pytest.approx(bits.value) and bits.high == pytest.approx(bits.value)
    assert task.metrics([answer("a", "perplexity", -1e9, 1)]) == {"perplexity": {}} and task.metrics([]) == {}


# ---- tokens ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("the river", " is old"),
        ("the river ", "is old"),  # the space goes to the continuation
        ("東京", " café🙂"),
        ("<s>the river", " is"),  # begins with the special token already
    ],
)
def test_a_context_and_its_continuation_are_the_whole_text(folder: Path, tmp_path: Path, context: str, continuation: str):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engines: Any = ModuloEngines()
    model = EnginesLM(recipe(folder, "transformers", 64), LmEvalConfig(), tokenizer, engines, AnswerLog(tmp_path, "x"))
    before, after = model._encode_pair(context, continuation)
    assert before[0] == tokenizer.bos_token_id and before[1] != tokenizer.bos_token_id and after
    assert [*before, *after] == tokenizer(context + continuation, add_special_tokens=not context.startswith("<s>")).input_ids
