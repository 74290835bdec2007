"""The suites code, code_base and ifeval: prompts as the benchmarks' own, and whole runs on data of each format."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from pipeline.algorithms.evaluate import TaskConfig, TaskDataConfig
from pipeline.config import RECIPES, TokenizerConfig, inspect
from pipeline.evaluation import task_data
from pipeline.evaluation.answers import read_answers
from pipeline.evaluation.formats.programming import MBPP, HumanEval, LiveCodeBench, LiveCodeBenchArguments, StyleArguments
from pipeline.evaluation.prompts import PromptEncoder
from pipeline.evaluation.questions import Answer
from pipeline.evaluation.sampled import GenerationTask, InstructionTask
from pipeline.evaluation.task_data import TaskData
from pipeline.recipe.problems import RecipeError
from tests.end_to_end.runs import LOCAL, submit
from tests.environments.test_ifeval import RECORD as IFEVAL
from tests.evaluation.code_records import APPEND, HELPED, MBPP_FULL, MBPP_PLUS, MBPP_SANITIZED, MEANS, SUMS

RECORDS = {
    "code": {
        "humaneval": [HELPED, MEANS],
        "humaneval_plus": [MEANS],
        "mbpp": [MBPP_SANITIZED],
        "mbpp_plus": [MBPP_PLUS],
        "livecodebench": [SUMS, APPEND],
    },
    "code_base": {"humaneval": [HELPED], "humaneval_plus": [MEANS], "mbpp": [MBPP_FULL], "mbpp_plus": [MBPP_PLUS]},
    "ifeval": {"ifeval": [IFEVAL, {**IFEVAL, "key": 1001, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]},
}
"""Suite -> task -> records."""
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def loaded(suite: str, folder: Path, *overrides: str):
    paths = []
    for name, records in RECORDS[suite].items():
        path = folder / f"{suite}-{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        paths += [f"evaluate.tasks.{name}.data.data_path={path}", f"evaluate.tasks.{name}.data.dataset_name=null"]
    return f"{RECIPES}/suites/{suite}.yaml", [*paths, *overrides]


def read(suite: str, name: str, folder: Path) -> tuple[TaskConfig, TaskData]:
    recipe, overrides = loaded(suite, folder, "policy.model_name=m", "name=n", f"run_dir={folder}")
    task = inspect(recipe, overrides).recipe.evaluate.tasks[name]
    return task, task_data.read(name, task)


@pytest.mark.parametrize("suite", RECORDS)
def test_every_task_of_the_suites_reads_its_records(suite: str, tmp_path: Path):
    assert RECORDS[suite]
    for name, records in RECORDS[suite].items():
        _, found = read(suite, name, tmp_path)
        wanted = len(records) - (name == "livecodebench")  # one is before the suite's window
        assert len({question.id for question in found.questions}) == len(found.questions) == wanted
        assert all(json.loads(question.task["answer"]) for question in found.questions)


def made_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with a chat template."""
    letters = sorted(ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *letters]
    tokenizer = Tokenizer(BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def rendered(suite: str, name: str, folder: Path) -> list[str]:
    task, found = read(suite, name, folder)
    encoder = PromptEncoder(name, task, TokenizerConfig(), made_tokenizer())
    return [encoder.text(question, found.examples.get(question.id, ())) for question in found.questions]


MBPP_BEGIN = "You are an expert Python programmer, and here is your task:"


def test_base_models_are_asked_as_lm_evaluation_harness_asks(tmp_path: Path):
    assert rendered("code_base", "humaneval", tmp_path) == [HELPED["prompt"]]
    (text,) = rendered("code_base", "mbpp", tmp_path)
    first, second, third, last = text.split("[DONE]\n\n")
    assert first == (
        f"{MBPP_BEGIN} Write a function to find the similar elements from the given two tuple lists."
        " Your code should pass these tests:\n\nassert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)\n"
        "assert similar_elements((1, 2, 3, 4),(5, 4, 3, 7)) == (3, 4)\n"
        "assert similar_elements((11, 12, 14, 13),(17, 15, 14, 13)) == (13, 14)\n[BEGIN]\n"
        "def similar_elements(test_tup1, test_tup2):\r\n  res = tuple(set(test_tup1) & set(test_tup2))\r\n  return (res) \n"
    )
    assert "identify non-prime numbers. Your" in second and "heap queue algorithm. Your" in third
    assert last == (
        f"{MBPP_BEGIN} {MBPP_FULL['text']} Your code should pass these tests:\n\nassert depth(root) == 3\n"
        "assert depth(root.left) == 2\nassert depth(None) == 0\n[BEGIN]\n"
    )
    assert MBPP_PLUS["prompt"] in rendered("code_base", "mbpp_plus", tmp_path)[0]


def test_chat_models_are_asked_by_messages(tmp_path: Path):
    asked = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
    text = rendered("code", "humaneval", tmp_path)[0]
    assert text == f"<user>{asked}{HELPED['prompt']}\n```\n</s><assistant>"
    prompt = HumanEval(StyleArguments("instruct")).question(HELPED, 0).prompt
    begun = f"Here is the completed function:\n```python\n{HELPED['prompt']}\n"
    assert prompt == [
        {"role": "user", "content": f"{asked}{HELPED['prompt']}\n```\n"},
        {"role": "assistant", "content": begun},
    ]
    tests = "\n".join(MBPP_SANITIZED["test_list"])
    text = rendered("code", "mbpp", tmp_path)[0]
    assert text.startswith(f"<user>{MBPP_BEGIN}\n{MBPP_SANITIZED['prompt']}\nYour code should pass these tests:\n{tests}\n")
    user, assistant = MBPP(StyleArguments("instruct")).question(MBPP_SANITIZED, 0).prompt
    assert (user["content"].rpartition("\n")[2], assistant["content"]) == (MBPP_SANITIZED["test_list"][2], "\n```python\n")
    user, assistant = MBPP(StyleArguments("instruct")).question(MBPP_PLUS, 0).prompt
    assert (
        user["content"]
        == f"{MBPP_PLUS['prompt']} Your code should satisfy the following assertion:\n{MBPP_PLUS['test_list'][0]}"
    )
    assert assistant["content"] == "Here is a solution to this programming problem:\n```python\n"


def test_livecodebench_asks_for_a_program_or_for_starter_code(tmp_path: Path):
    form = LiveCodeBench(LiveCodeBenchArguments())
    system, user = form.question(SUMS, 0).prompt
    assert system["content"].startswith("You are an expert Python programmer. You will be given a question")
    assert user["content"].startswith("### Question:\nText of question 1.\n\n### Format: Read the inputs from stdin")
    assert user["content"].endswith(
        "```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with backticks)\n\n"
    )
    question = form.question(APPEND, 0)
    assert "### Format: You will use the following starter code" in question.prompt[1]["content"]
    assert f"```python\n{APPEND['starter_code']}\n```" in question.prompt[1]["content"]
    assert (question.group, json.loads(question.task["answer"])["function"]) == ("hard", "append")
    assert json.loads(form.question(SUMS, 0).task["answer"])["function"] == ""


def test_livecodebenchs_window_of_dates(tmp_path: Path):
    path = tmp_path / "live.jsonl"
    path.write_text(json.dumps(SUMS) + "\n" + json.dumps(APPEND) + "\n")

    def asked(**window: str) -> list[str]:
        task = TaskConfig(format="livecodebench", format_kwargs=window, data=TaskDataConfig(data_path=str(path)))
        return [question.id for question in task_data.read("live", task).questions]

    assert asked() == asked(since="2024-08-10", until="2025-01-05") == ["q1", "q2"]
    assert asked(since="2024-08-11") == asked(since="2025-01-05", until="2025-01-05") == ["q2"]
    assert asked(until="2025-01-04") == ["q1"]
    with pytest.raises(RecipeError, match="expected a date such as 2024-08-01"):
        asked(since="August")


@pytest.mark.parametrize(
    ("form", "record", "message"),
    [
        (HumanEval, {**HELPED, "test": "assert True"}, r"does not define check\(candidate\)"),
        (MBPP, {**MBPP_SANITIZED, "prompt": ""}, "neither 'text' nor 'prompt'"),
        (MBPP, {**MBPP_SANITIZED, "test_list": ["assert area("]}, "the tests are not Python"),
        (MBPP, {**MBPP_SANITIZED, "test_list": ["assert 1 == 1"]}, "call no function"),
        (LiveCodeBench, {**APPEND, "metadata": "{}"}, "no func_name"),
    ],
)
def test_records_that_cannot_be_read(form, record: dict, message: str):
    with pytest.raises(ValueError, match=message):
        form(form.Arguments()).question(record, 0)


def test_shares_of_instructions_count_all_instructions():
    """As lm-evaluation-harness's inst_level_strict_acc: 3 of 3 and 0 of 1 are 3 of 4."""
    task = object.__new__(InstructionTask)
    task.config = TaskConfig()
    kept = [
        Answer(id, 0, 0.0, {"instruction_strict": share, "instruction_loose": share, "instructions": count})
        for id, share, count in (("a", 1.0, 3.0), ("b", 0.0, 1.0), ("c", 0.5, 2.0))
    ]
    found = task.metrics(kept)
    assert sum(value for (value,) in found["instruction_strict"].values()) / 3 == pytest.approx(4 / 6)
    assert GenerationTask.metrics(task, kept)["instruction_strict"] == {"a": [1.0], "b": [0.0], "c": [0.5]}
    assert "instruction_strict" not in task.metrics([])


# ---- whole runs --------------------------------------------------------------------------------------------------------------


def made_model(folder: Path) -> Path:
    config = json.loads((RECIPES / "tiny/config.json").read_text())
    config |= {"vocab_size": 320, "max_position_embeddings": 4096, "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    made_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("suite", RECORDS)
def test_a_suite_runs_whole(suite: str, tmp_path: Path):
    if suite == "ifeval":
        pytest.importorskip("langdetect")
    recipe, paths = loaded(suite, tmp_path)
    run = submit(
        tmp_path / "run",
        *LOCAL,
        f"recipe={recipe}",
        f"policy.model_name={made_model(tmp_path / 'model')}",
        "policy.random_init=true",
        "policy.precision=float32",
        "policy.max_total_sequence_length=4096",
        "policy.generation.backend=transformers",
        "cluster.generate.ranks_per_node=1",
        *paths,
        *(f"evaluate.tasks.{name}.max_new_tokens=12" for name in RECORDS[suite]),
    )
    assert run.status == 0, run.output
    summary = json.loads((run.folder / "scores.json").read_text())
    assert set(summary["tasks"]) == set(RECORDS[suite])
    for name, task in summary["tasks"].items():
        config, found = read(suite, name, tmp_path)
        answers = read_answers(run.folder / f"answers/{name}.jsonl")
        assert len(answers) == len(found.questions) * config.num_samples == task["samples"]
        assert task["unjudged"] == 0 and all(not answer.failure for answer in answers)
        assert 0 <= task["metrics"]["score"]["value"] <= 1
