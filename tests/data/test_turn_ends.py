"""The end of an assistant's turn in templates of several shapes, and what supervised training teaches at the end of a turn."""

import numpy as np
import pytest

from pipeline.config import DataConfig, DatasetConfig, TokenizerConfig
from pipeline.data.chat import Encoder
from pipeline.data.observations import Observations
from pipeline.data.turn_ends import TurnEnds, find_turn_ends
from tests.data.made_tokenizers import with_marks
from tests.data.test_chat import CHATML, LLAMA3, MARKED_SHORT
from tests.data.test_observations import BEGINNINGS, ENDLESS, MISTRAL, SILENT

HARMONY = (  # gpt-oss: the last answer ends in <|return|>, an earlier one in <|end|>, a call in <|call|>
    "<|start|>system<|message|>be brief<|end|>{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|message|>{}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
FRAMED = CHATML.replace("{% if add", "{% if messages[-1].role == 'assistant' %}{{ eos_token }}{% endif %}{% if add")  # Phi-3.5
COHERE = (  # it writes the beginning of an answer whether it is asked to or not
    "{{ bos_token }}{% for m in messages %}<|start|><|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|done|>"
    "{% endif %}<|end|>{% endfor %}<|start|><|assistant|><|think|>"
)
SPELLED = CHATML.replace("<|im_end|>", "</turn>")
SECTIONS = (  # Kimi K3: text between the tokens of an end
    "{% for m in messages %}<|open|>{{ m.role }}<|sep|>{{ m.content }}<|close|>{{ m.role }}<|sep|><|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|open|>assistant<|sep|>{% endif %}"
)
LAST_ONLY = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% else %}{{ eos_token }}{% endif %}"
)
NAMES = "im_start im_end start end eot message channel return call done user assistant system think open close sep"
MARKS = [*(f"<|{name}|>" for name in NAMES.split()), "[INST]", "[/INST]"]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, TurnEnds("<|im_end|>", "<|im_end|>", "", "<|im_end|>")),
        (LLAMA3, TurnEnds("<|eot|>", "<|eot|>", "", "<|eot|>")),
        (MISTRAL, TurnEnds("</s>", "</s>", "", "</s>")),
        (SILENT, TurnEnds("</s>", "</s>", "", "</s>")),
        (HARMONY, TurnEnds("<|return|>", "", "<|call|>", "<|end|>")),
        (FRAMED, TurnEnds("</s>", "<|im_end|>", "", "<|im_end|>")),
        (COHERE, TurnEnds("<|end|>", "<|end|>", "", "<|done|><|end|>")),
        (SECTIONS, TurnEnds("<|end|>", "<|end|>", "", "<|close|>assistant<|sep|><|end|>")),
        (LAST_ONLY, TurnEnds("</s>", "", "", "")),
        (ENDLESS, TurnEnds()),
        (BEGINNINGS, TurnEnds()),
        (SPELLED, TurnEnds()),
        ("{{ raise_exception('never') }}", TurnEnds()),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", TurnEnds()),
    ],
)
def test_the_end_is_what_the_template_renders(template, ends):
    found = find_turn_ends(with_marks(MARKS, template))
    assert (found.last, found.between, found.inner) == (ends.last, ends.between, ends.inner)
    assert bool(found.why) == (not found.stops)
    assert found.call == ends.call


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, HARMONY, FRAMED, SECTIONS, MARKED_SHORT])
def test_training_teaches_the_token_that_ends_a_completion(template):
    tokenizer = with_marks(MARKS, template)
    encoder = Encoder(tokenizer, TokenizerConfig(), DataConfig(), DatasetConfig(messages_key="messages"))
    said = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    tokens, mask = encoder.conversation({"messages": said})
    ends = find_turn_ends(tokenizer)
    taught = tokenizer.convert_ids_to_tokens(int(tokens[np.flatnonzero(mask)[-1]]))
    assert taught == (ends.between if template == FRAMED else ends.last)
    assert {taught, ends.last} <= {*ends.stops}


@pytest.mark.parametrize("end", ["<|return|>", "<|call|>"])
def test_a_turn_has_one_end(end):
    """gpt-oss's template writes <|end|> between turns, where the policy has sampled another token."""
    tokenizer = with_marks(MARKS, HARMONY)
    told = Observations(tokenizer, TokenizerConfig(), chat=True)
    reply = {"role": "user", "content": "21"}
    after = "<|start|>user<|message|>21<|end|><|start|>assistant"
    assert tokenizer.decode(told.tokens(reply, tokenizer.convert_tokens_to_ids(end))) == after
    assert tokenizer.decode(told.tokens(reply, None)) == f"<|end|>{after}"
