"""Data sets, prompt files and templates."""

from __future__ import annotations

import jinja2
import pytest

from tests.nemo_rl.test_translation import RECIPES, inspect, problem, read, with_keys

TURNS = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def test_the_default_fills_in() -> None:
    data = read("grpo").data
    assert (data.train.dataset_name, data.train.env_name, data.train.seed) == ("OpenMathInstruct-2", "math", 7)
    assert data.train.split_validation_size == 0.05 and data.validation is None
    assert data.overlong_prompts == "drop" and data.max_input_seq_length == 256


def test_prompt_files_lie_below_a_folder_that_the_recipe_lies_in() -> None:
    assert read("grpo").data.train.prompt_file == str(RECIPES / "examples/prompts/boxed.txt")
    missing = problem("grpo", "data.default.prompt_file=examples/prompts/none.txt")
    assert missing.startswith("data.default.prompt_file: there is no examples/prompts/none.txt")


def test_a_data_set_that_holds_nothing_out() -> None:
    train = ("data.train.dataset_name=DeepScaler", "data.validation={dataset_name: AIME2024, repeat: 16}")
    data = read("grpo", *train).data
    assert data.train.split_validation_size == 0 and (data.validation.dataset_name, data.validation.repeat) == ("AIME2024", 16)


def test_one_set_to_validate_on() -> None:
    assert "data.train.split_validation_size: 0.05 asks for several data sets" in problem(
        "grpo", "data.validation={dataset_name: AIME2024}"
    )
    assert read("grpo", "data.train=[{dataset_name: OpenMathInstruct-2, split_validation_size: 9}]").data.train.seed == 42
    assert "DeepScaler, gsm8k asks for several data sets" in "".join(
        inspect("grpo", "data.train=[{dataset_name: DeepScaler}, {dataset_name: gsm8k}]").problems
    )


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
    ("override", "starts"),
    [
        ("data.train.dataset_name=NoSuchSet", "data.train: NoSuchSet asks for this data set"),
        ("data.default.processor=multichoice_qa_processor", "data.default.processor: multichoice_qa_processor asks for"),
        ("data.default.colour=red", "data.default.colour"),
        ("data.train.colour=red", "data.train.colour"),
    ],
)
def test_what_we_do_not_have(override: str, starts: str) -> None:
    assert any(each.startswith(starts) for each in with_keys("grpo", override)[1].problems)


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
