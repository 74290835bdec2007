"""A rollout function's messages to the policy are rendered as prompts and observations are."""

import numpy as np
import pytest

from pipeline.config import TokenizerConfig
from pipeline.data.observations import Observations
from pipeline.rollout.judges.conversation_text import ConversationText
from pipeline.types import Completion
from tests.data.made_tokenizers import with_marks

MARKS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def made(chat=True):
    tokenizer, config = with_marks(MARKS, CHATML), TokenizerConfig(name="x")
    return tokenizer, ConversationText(tokenizer, config, chat, Observations(tokenizer, config, chat))


def test_conversations_are_rendered_with_the_chat_template():
    tokenizer, text = made()
    begin = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    for context in ("why", {"role": "user", "content": "why"}, [{"role": "user", "content": "why"}]):
        assert tokenizer.decode(text.context(context)) == begin
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for after, rendered in ((end, "\n"), (5, "<|im_end|>\n")):
        expected = f"{rendered}<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
        for reply in ("no", {"role": "user", "content": "no"}, [{"role": "user", "content": "no"}]):
            assert tokenizer.decode(text.reply(reply, after, 99)) == expected
    assert text.reply("no", end, 3) is None and text.reply([5, 6, 7], end, 2) is None
    assert text.reply(np.array([5, 6]), end, 2).tolist() == text.reply([5, 6], end, 2).tolist() == [5, 6]
    drawn = tokenizer("so|then", add_special_tokens=False).input_ids
    completion = Completion("x", np.array([*drawn, end], np.int32), np.zeros(len(drawn) + 1, np.float32), (), "stop")
    assert text.decoded(completion) == "so|then"
    assert tokenizer.decode(text.plain("no")) == "no"


def test_plain_conversations_have_no_template():
    tokenizer, text = made(chat=False)
    assert tokenizer.decode(text.context("why")) == "<s>why" and tokenizer.decode(text.reply("no", 5, 99)) == "no"
    with pytest.raises(TypeError, match=r"got messages, but data\.apply_chat_template is false"):
        text.context([{"role": "user", "content": "why"}])


@pytest.mark.parametrize("wrong", [3.5, None, [1.5], [[1]], [{"role": "user"}, 3], np.zeros(2)])
def test_other_values_are_refused(wrong):
    _, text = made()
    with pytest.raises(TypeError, match="expected the prompt, a drawn turn, messages, a text or tokens"):
        text.context(wrong)
    with pytest.raises(TypeError, match="expected a text, messages or tokens"):
        text.reply(wrong, 5, 99)
    for tokens in ([-1], [text.vocabulary]):
        with pytest.raises(ValueError, match="got the token"):
            text.context(tokens)
