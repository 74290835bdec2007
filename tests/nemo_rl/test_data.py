"""Data sets, prompt files and templates."""

from __future__ import annotations

import jinja2
import pytest

from tests.nemo_rl.test_translation import RECIPES, inspect, problem, read, with_keys
from tests.problems import named

TURNS = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def test_the_default_fills_in() -> None:
    data = read("grpo").data
    assert (data.train.dataset_name, data.train.env_name, data.train.seed) == ("OpenMathInstruct-2", "math", 7)
    assert data.train.split_validation_size == 0.05 and data.validation is None
    assert data.overlong_prompts == "drop" and data.max_input_seq_length == 256


def test_prompt_files_are_found_below_a_parent_of_the_recipe() -> None:
    assert read("grpo").data.train.prompt_file == str(RECIPES / "examples/prompts/boxed.txt")
    missing = problem("grpo", "data.default.prompt_file=examples/prompts/none.txt")
    assert missing == ("data.default.prompt_file", "file-not-found")


def test_a_data_set_that_holds_nothing_out() -> None:
    train = ("data.train.dataset_name=DeepScaler", "data.validation={dataset_name: AIME2024, repeat: 16}")
    data = read("grpo", *train).data
    assert data.train.split_validation_size == 0 and (data.validation.dataset_name, data.validation.repeat) == ("AIME2024", 16)


def test_held_out_records_and_another_data_set_are_validated_on() -> None:
    loaded = inspect("grpo", "data.validation={dataset_name: AIME2024}")
    assert (loaded.recipe.data.train.split_validation_size, loaded.recipe.data.validation.dataset_name) == (0.05, "AIME2024")
    assert any(
        note.startswith("data.validation: the maximum number of samples applies to each data set") for note in loaded.notes
    )


def test_a_list_of_one() -> None:
    data = read("grpo", "data.train=[{dataset_name: OpenMathInstruct-2, split_validation_size: 9}]").data
    assert data.train.seed == 42 and data.datasets == {}


SEVERAL = (
    "data.train=[{dataset_name: OpenMathInstruct-2, seed: 3, split_validation_size: 0.1}, {dataset_name: DeepScaler}]",
    "data.validation=[{dataset_name: AIME2024, repeat: 16}, {dataset_name: OpenMathInstruct-2, env_name: math}]",
)


def test_several_data_sets() -> None:
    """Each has the defaults and its own name; theirs are concatenated, so none has a weight."""
    data = read("grpo", *SEVERAL).data
    assert data.train is None and data.validation is None
    assert [(name, one.dataset_name, one.env_name, one.weight) for name, one in data.datasets.items()] == [
        ("OpenMathInstruct-2", "OpenMathInstruct-2", "math", None),
        ("DeepScaler", "DeepScaler", "math", None),
    ]
    held_out = data.datasets["OpenMathInstruct-2"]
    assert (held_out.split_validation_size, held_out.seed) == (0.1, 3)
    assert {one.prompt_file for one in data.datasets.values()} == {str(RECIPES / "examples/prompts/boxed.txt")}
    assert [(name, one.repeat) for name, one in data.validations.items()] == [("AIME2024", 16), ("OpenMathInstruct-2_2", 1)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_several_data_sets_in_their_order_are_mixed_all_the_same(shuffle: bool) -> None:
    notes = inspect("grpo", *SEVERAL, f"data.shuffle={shuffle}".lower()).notes
    assert any(note.startswith("data.shuffle=false: the data sets are mixed") for note in notes) is not shuffle


def test_several_files() -> None:
    files = (
        "{dataset_name: ResponseDataset, data_path: /a/train.jsonl}",
        "{dataset_name: ResponseDataset, data_path: /b/train.jsonl}",
    )
    data = read("grpo", f"data.train=[{', '.join(files)}]", "grpo.val_period=0").data
    assert {name: one.data_path for name, one in data.datasets.items()} == {
        "train": "/a/train.jsonl",
        "train_2": "/b/train.jsonl",
    }


def test_a_problem_in_a_list_names_its_index() -> None:
    _, translation = with_keys("grpo", "data.train=[{dataset_name: gsm8k}, {dataset_name: gsm8k, colour: red}]")
    assert named(translation.problems) == {("data.train[1].colour", "unknown-key")}
    _, translation = with_keys("grpo", "data.train=[{dataset_name: gsm8k}, {dataset_name: NoSuchSet}]")
    assert named(translation.problems) == {("data.train[1]", "unsupported")}


def test_files_by_keys() -> None:
    train = "data.train={dataset_name: ResponseDataset, data_path: /some/train.jsonl, input_key: question}"
    recipe = read("grpo", train, "grpo.val_period=0").data.train
    assert (recipe.data_path, recipe.dataset_name, recipe.input_key, recipe.output_key) == (
        "/some/train.jsonl",
        None,
        "question",
        "output",
    )


@pytest.mark.parametrize(
    ("override", "key", "code"),
    [
        ("data.train.dataset_name=NoSuchSet", "data.train", "unsupported"),
        ("data.default.processor=multichoice_qa_processor", "data.default.processor", "unsupported"),
        ("data.default.colour=red", "data.default.colour", "unknown-key"),
        ("data.train.colour=red", "data.train.colour", "unknown-key"),
    ],
)
def test_unsupported_data_sets_are_refused(override: str, key: str, code: str) -> None:
    assert named(with_keys("grpo", override)[1].problems) == {(key, code)}


@pytest.mark.parametrize(
    ("keys", "rendered"),
    [
        ((), "<s>1+12</s>"),
        (("data.add_bos=false",), "1+12</s>"),
        (("data.add_bos=false", "data.add_eos=false"), "1+12"),
        (("policy.tokenizer.chat_template='<s>{{ messages[0][\"content\"] }}</s>'",), "<s>1+1</s>"),
        (("policy.tokenizer.chat_template=null",), "<s>1+12</s>"),  # the bare texts
    ],
)
def test_a_conversation_begins_and_ends_as_there(keys: tuple[str, ...], rendered: str) -> None:
    template = jinja2.Template(read("sft", *keys).policy.tokenizer.chat_template)
    assert template.render(messages=TURNS, bos_token="<s>", eos_token="</s>") == rendered


def test_a_prompt_gets_no_end() -> None:
    template = jinja2.Template(read("sft").policy.tokenizer.chat_template)
    assert template.render(messages=TURNS[:1], bos_token="<s>", eos_token="</s>") == "<s>1+1"


def test_the_tokenizers_own_template_is_left_alone() -> None:
    loaded = inspect("sft", "policy.tokenizer.chat_template=default")
    assert loaded.recipe.policy.tokenizer.chat_template is None
    assert any(note.startswith("data.add_bos, data.add_eos") for note in loaded.notes)
