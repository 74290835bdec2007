"""A tokenizer from its files is transformers' tokenizer: tokens, renderings, and the stop tokens that follow."""

import json

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from pipeline.config import DataConfig, DatasetConfig, PolicyConfig, TokenizerConfig
from pipeline.data.chat import Encoder, load_tokenizer
from pipeline.data.file_tokenizer import FileTokenizer
from pipeline.data.stop_tokens import decide, stop_tokens
from pipeline.data.turn_ends import find_turn_ends
from tests.data.made_tokenizers import END, MARK, byte_level, metaspace, with_marks, word_piece
from tests.data.test_chat import CHATML, MARKED
from tests.data.test_observations import MISTRAL
from tests.data.test_turn_ends import COHERE, FRAMED, HARMONY, LAST_ONLY, MARKS, SECTIONS
from tests.problems import refused

TALK = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "3+4"}]


def both(folder, **options):
    config = TokenizerConfig(str(folder), **options)
    return FileTokenizer(folder, config), load_tokenizer(config)


@pytest.mark.parametrize("template", [CHATML, MARKED, MISTRAL, HARMONY, FRAMED, COHERE, SECTIONS, LAST_ONLY])
def test_renderings_and_stop_tokens_equal_transformers(tmp_path, template):
    with_marks(MARKS, template).save_pretrained(tmp_path)
    ours, theirs = both(tmp_path)
    for prompt in (True, False):
        options = {"add_generation_prompt": prompt, "return_dict": False}
        assert ours.apply_chat_template(TALK, **options) == theirs.apply_chat_template(TALK, **options)
    assert find_turn_ends(ours) == find_turn_ends(theirs)
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 9]}')
    ends = find_turn_ends(ours)
    assert decide(ours, ends, {}, {"eos_token_id": [2, 9]}, {}) == stop_tokens(
        PolicyConfig(str(tmp_path), tokenizer=TokenizerConfig(str(tmp_path)))
    )
    data, dataset = DataConfig(), DatasetConfig(input_key="input")
    prompts = [Encoder(one, TokenizerConfig(), data, dataset).prompt({"input": "1+1"}).tolist() for one in (ours, theirs)]
    assert prompts[0] == prompts[1]
    if template is not MARKED:  # only transformers reads its {% generation %} blocks
        data, dataset = DataConfig(apply_chat_template=True), DatasetConfig(messages_key="talk")
        encoders = [Encoder(one, TokenizerConfig(), data, dataset) for one in (ours, theirs)]
        (tokens, mask), (their_tokens, their_mask) = (encoder.conversation({"talk": TALK[:2]}) for encoder in encoders)
        assert (tokens.tolist(), mask.tolist()) == (their_tokens.tolist(), their_mask.tolist())


@pytest.mark.parametrize("made", [byte_level, metaspace, word_piece])
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True, "add_eos_token": True}, {"pad_token": "<new>"}])
@pytest.mark.parametrize("processed", [False, True])
def test_texts_have_transformers_tokens(tmp_path, made, settings, processed):
    tokenizer = made()
    if processed:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{END} $A {MARK}", special_tokens=[(END, 1), (MARK, 2)]
        )
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    given = json.loads(path.read_text())
    path.write_text(json.dumps({**given, "bos_token": given.get("bos_token") or "<begin>", **settings}))
    ours, theirs = both(tmp_path)
    for text in ("The answer is 4.", "日本 <|end|> b", ""):
        for special in (True, False):
            assert ours(text, add_special_tokens=special).input_ids == theirs(text, add_special_tokens=special).input_ids
    assert len(ours) == len(theirs) and {*ours.added_tokens_decoder} == {*theirs.added_tokens_decoder}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.decode(theirs("The answer is 4.").input_ids) == theirs.decode(theirs("The answer is 4.").input_ids)


def test_the_recipes_template_is_a_text_a_file_a_folder_or_a_name(tmp_path):
    tokenizer = with_marks(MARKS)
    tokenizer.chat_template = {"default": MISTRAL, "tool_use": HARMONY}
    tokenizer.save_pretrained(tmp_path / "named")
    with_marks(MARKS, COHERE).save_pretrained(tmp_path / "other")
    (tmp_path / "file.jinja").write_text(CHATML)
    given = {
        "default": {"default": MISTRAL, "tool_use": HARMONY},
        "tool_use": HARMONY,
        str(tmp_path / "file.jinja"): CHATML,
        str(tmp_path / "other"): COHERE,
        FRAMED: FRAMED,
    }
    for text, template in given.items():
        ours, theirs = both(tmp_path / "named", chat_template=text)
        assert ours.chat_template == theirs.chat_template == template
    for text in ("X.jinja", "tool", str(tmp_path / "none.jinja")):
        for load in (lambda config: FileTokenizer(tmp_path / "named", config), load_tokenizer):
            with refused(("policy.tokenizer.chat_template", "file-not-found")):
                load(TokenizerConfig(str(tmp_path / "named"), text))


def test_prompts_without_the_users_text_are_refused(tmp_path):
    with_marks(MARKS).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for template in ("no{{ '' }}", "{{ messages[0].content[:3] }}"):
        tokenizer.chat_template = template
        with refused(("policy.tokenizer.chat_template", "unsupported")):
            Encoder(tokenizer, TokenizerConfig(), DataConfig(), DatasetConfig())
        Encoder(tokenizer, TokenizerConfig(), DataConfig(apply_chat_template=False), DatasetConfig())
