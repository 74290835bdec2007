"""The tokens that end a completion, where tokenizer, configs and chat template disagree."""

import json
from dataclasses import replace

import pytest

from pipeline.config import PolicyConfig, TokenizerConfig
from pipeline.data.stop_tokens import stop_tokens
from tests.data.made_tokenizers import with_marks
from tests.data.test_chat import CHATML
from tests.data.test_observations import ENDLESS
from tests.data.test_turn_ends import FRAMED, HARMONY, SPELLED
from tests.problems import refused

MARKS = ["<|im_start|>", "<|im_end|>", "<|end_of_turn|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"]


@pytest.fixture
def model(tmp_path):
    """Return a function (template in the model's folder, config.json, generation_config.json, recipe's template) -> policy."""

    def make(own: str | None, config: dict | None = None, generation: dict | None = None, given: str | None = None):
        with_marks(MARKS, own).save_pretrained(tmp_path)
        for name, content in (("config.json", config), ("generation_config.json", generation)):
            if content is not None:
                (tmp_path / name).write_text(json.dumps(content))
        return PolicyConfig(model_name=str(tmp_path), tokenizer=TokenizerConfig(str(tmp_path), given))

    return make


def texts(policy: PolicyConfig) -> dict[str, tuple[str, ...]]:
    return {token.text: token.sources for token in stop_tokens(policy).tokens}


def test_the_union_of_tokenizer_configs_and_template(model):
    tokenizer = with_marks(MARKS)
    turn, word = tokenizer.convert_tokens_to_ids("<|end_of_turn|>"), 9
    policy = model(CHATML, {"eos_token_id": [tokenizer.eos_token_id, turn]}, {"eos_token_id": word})
    assert texts(policy) == {
        "</s>": ("tokenizer", "config.json"),
        "<|end_of_turn|>": ("config.json",),
        "<|im_end|>": ("chat template",),
        tokenizer.convert_ids_to_tokens(word): ("generation_config.json",),
    }


@pytest.mark.parametrize(
    ("own", "given", "ends"),
    [
        (None, None, {"</s>"}),
        (None, CHATML, {"</s>", "<|im_end|>"}),  # a base model with a template in the recipe
        (CHATML, None, {"</s>", "<|im_end|>"}),
        (FRAMED, None, {"</s>", "<|im_end|>"}),
        (HARMONY, None, {"</s>", "<|return|>"}),  # <|end|> ends a thought too
        (CHATML, ENDLESS, {"</s>"}),
        (None, SPELLED, {"</s>"}),
    ],
)
def test_the_templates_end_ends_a_completion(model, own, given, ends):
    policy = model(own, {}, given=given)
    assert {*texts(policy)} == ends
    assert bool(stop_tokens(policy).notes) == (given in (ENDLESS, SPELLED))


def test_config_of_a_language_model_inside_another_and_overrides(model):
    turn, start = (with_marks(MARKS).convert_tokens_to_ids(text) for text in ("<|end_of_turn|>", "<|im_start|>"))
    policy = model(None, {"eos_token_id": None, "text_config": {"eos_token_id": [turn]}})
    assert texts(policy)["<|end_of_turn|>"] == ("config.json text_config",)
    policy = replace(policy, hf_config_overrides={"text_config": {"eos_token_id": start}})
    assert {*texts(policy)} == {"</s>", "<|im_start|>"}
    assert {*texts(model(None, {"text_config": 3}))} == {"</s>"}


def test_a_default_of_the_config_that_is_an_ordinary_word_does_not_count(model):
    """transformers writes eos_token_id 2 into the config of a new Llama, whatever the tokenizer's token 2 is."""
    found = stop_tokens(model(None, {"eos_token_id": 12}))
    assert [token.text for token in found.tokens] == ["</s>"] and len(found.notes) == 1


@pytest.mark.parametrize("wrong", ["2", 2.5, [2, None], True, -1, {"id": 2}])
def test_ids_that_are_none_are_refused(model, wrong):
    with refused(("policy.model_name", "bad-format")):
        stop_tokens(model(None, {"eos_token_id": wrong}))


def test_an_export_lists_what_training_teaches_first(model):
    policy = model(None, {}, {"eos_token_id": 9}, CHATML)
    taught = with_marks(MARKS).convert_tokens_to_ids("<|im_end|>")
    exported = stop_tokens(policy).exported
    assert isinstance(exported, list) and exported[0] == taught and {*exported} == {*stop_tokens(policy).ids}
