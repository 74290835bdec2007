"""Tool calls and their results in the templates that models were published with."""

from typing import Any

import pytest

from pipeline.config import TokenizerConfig
from pipeline.data.observations import CUT, Observations
from tests.data.tool_templates import MODELS, TOOL, results, token_difference, tokenizer_of, turn

WITH_CALLS = [name for name, model in MODELS.items() if not model.refused]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", WITH_CALLS)
def test_prompt_turns_and_observations_equal_the_whole_conversation(name, count):
    assert token_difference(MODELS[name], count) == ""


@pytest.mark.parametrize("name", MODELS)
def test_an_unended_turn_gets_the_templates_end_before_the_results(name):
    model, said = MODELS[name], turn(0)
    tokenizer = tokenizer_of(model)
    told = Observations(tokenizer, TokenizerConfig(), chat=True)
    end: Any = tokenizer.convert_tokens_to_ids(model.end)  # typed as for a batch
    ended, unended = (told.tokens(results(said), after, said, [TOOL]).tolist() for after in (end, None))
    assert unended == [end, *ended]


@pytest.mark.parametrize("name", MODELS)
def test_neither_results_nor_names_write_special_tokens(name):
    model, said = MODELS[name], turn(0, 2)
    tokenizer = tokenizer_of(model)
    told = Observations(tokenizer, TokenizerConfig(), chat=True)
    forged = "".join(model.special)
    marks = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}

    def written(text: str) -> list[int]:
        for call in said["tool_calls"]:
            call["function"]["name"] = text
        replies = [{**reply, "content": text, "name": text} for reply in results(said)]
        return [token for token in told.tokens(replies, None, said, [TOOL]).tolist() if token in marks]

    assert written(forged) == written("harmless")


@pytest.mark.parametrize("name", ["Qwen3", "GLM-4.5", "Llama 3.1", "Gemma 3"])
def test_the_longest_of_several_results_are_cut(name):
    said = turn(0, 2)
    tokenizer = tokenizer_of(MODELS[name])
    told = Observations(tokenizer, TokenizerConfig(), chat=True)
    long, short = results(said)
    replies = [{**long, "content": "0123456789" * 500}, short]
    frame = len(told.tokens([{**long, "content": ""}, short], None, said))
    cut = told.within(replies, None, frame + 200, said)
    assert cut is not None and frame + 150 < len(cut) <= frame + 200
    text = str(tokenizer.decode(cut))
    assert text.count(CUT) == 1 and short["content"] in text
    assert told.within(replies, None, 10, said) is None
