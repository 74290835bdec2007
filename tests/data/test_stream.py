import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from pipeline.config import RECIPES, AnswerCheck, DataConfig, DatasetConfig, EnvironmentConfig, TokenizerConfig, answer_check
from pipeline.data import stream
from pipeline.data.chat import Encoder, load_tokenizer
from pipeline.data.stream import ExampleStream, PromptStream
from pipeline.generate.request_limits import new_token_limit
from pipeline.types import Request, Sampling
from tests.problems import refused

TOKENIZER = AutoTokenizer.from_pretrained(RECIPES / "tiny")
RECORDS = [{"input": f"{i}+1=", "output": str(i + 1)} for i in range(7)]


def encoder(limit: int = 100, overlong: str = "error", bad: str = "error") -> Encoder:
    data = DataConfig(max_input_seq_length=limit, overlong_prompts=overlong, bad_records=bad, apply_chat_template=False)
    return Encoder(TOKENIZER, TokenizerConfig(), data, DatasetConfig(env_name="addition"))


def prompts(
    seed: int = 5,
    epochs: int = 100,
    records: list = RECORDS,
    shuffle: bool = True,
    max_length: int = 100,
    check=None,
    **options,
) -> PromptStream:
    order = {"seed": seed, "shuffle": shuffle, "max_num_epochs": epochs, "check": check}
    return PromptStream(records, encoder(**options), max_length=max_length, **order)


def answers(taken: list) -> list[str]:
    return [prompt.task["answer"] for prompt in taken]


def test_an_epoch_is_every_record_once_in_an_order_of_its_own():
    stream = prompts()
    epochs = [answers(stream.take(7)) for _ in range(3)]
    assert all(sorted(epoch) == ["1", "2", "3", "4", "5", "6", "7"] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert answers(prompts().take(7)) == epochs[0] != answers(prompts(seed=6).take(7))
    assert answers(prompts(shuffle=False).take(9)) == ["1", "2", "3", "4", "5", "6", "7", "1", "2"]


def test_a_prompt_has_all_its_fields():
    prompt = prompts(shuffle=False).take(9)[8]
    assert (prompt.index, prompt.environment, prompt.task) == (8, "addition", {"text": "1+1=", "answer": "2"})
    assert prompt.tokens.dtype == np.int32
    assert TOKENIZER.decode(prompt.tokens) == "<s>1+1="


@pytest.mark.parametrize("before", [0, 1, 6, 7, 8, 17])
def test_resumes_at_the_same_prompt_whatever_the_batch(before: int):
    whole = prompts().take(30)
    first = prompts()
    taken = first.take(before)
    state = json.loads(json.dumps(first.state_dict()))
    second = prompts()
    second.take(3)
    second.load_state_dict(state)
    while len(taken) < 30:
        taken += second.take(min(4, 30 - len(taken)))
    assert [prompt.index for prompt in taken] == list(range(30))
    assert answers(taken) == answers(whole)
    assert second.state_dict()["loader"] == prompts_after(30)


def prompts_after(n: int) -> dict:
    stream = prompts()
    stream.take(n)
    return stream.state_dict()["loader"]


def test_ends_after_max_num_epochs_and_continues_if_there_are_more():
    stream = prompts(epochs=2)
    assert [len(stream.take(5)) for _ in range(4)] == [5, 5, 4, 0]
    longer = prompts(epochs=3)
    longer.load_state_dict(stream.state_dict())
    assert [prompt.index for prompt in longer.take(100)] == list(range(14, 21))


def test_state_of_another_stream_is_refused():
    for other, what in (
        (prompts(seed=6), "seed"),
        (prompts(records=RECORDS[:6]), "records"),
        (prompts(shuffle=False), "shuffle"),
    ):
        with pytest.raises(ValueError, match=f"got {what}"):
            prompts().load_state_dict(other.state_dict())


def test_leaves_the_global_random_state_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    stream = prompts()
    stream.take(3)
    prompts().load_state_dict(stream.state_dict())
    assert torch.equal(torch.rand(3), expected)


def test_a_prompt_that_is_too_long():
    records = [*RECORDS, {"input": "123456+1=", "output": "123457"}]
    with pytest.raises(ValueError, match=r"record 7 \(from 0\): 10 tokens are more than data.max_input_seq_length 9"):
        prompts(records=records, limit=9)
    stream = prompts(records=records, limit=9, overlong="drop", epochs=2)
    assert stream.dropped_at_start == 1
    taken = stream.take(100)
    assert sorted(answers(taken)) == sorted([str(i) for i in range(1, 8)] * 2)
    assert len({prompt.index for prompt in taken}) == 14
    with refused(("data", "bad-record")):
        prompts(records=records, limit=2, overlong="drop")


def test_a_prompt_that_fills_the_context():
    """An engine would refuse such a prompt, since no token fits, and end the run."""
    records = [*RECORDS, {"input": "12+1=", "output": "13"}]
    message = r"record 7 \(from 0\): 6 tokens leave no room for an answer in policy.max_total_sequence_length 6"
    with pytest.raises(ValueError, match=message):
        prompts(records=records, limit=6, max_length=6)
    stream = prompts(records=records, limit=6, max_length=6, overlong="drop", epochs=1)
    assert stream.dropped_at_start == 1
    taken = stream.take(100)
    assert sorted(answers(taken)) == [str(i) for i in range(1, 8)]
    for prompt in taken:  # with the engine's own word
        assert new_token_limit(Request("0", prompt.tokens, 0, Sampling(1.0, max_new_tokens=9)), 6) == 1
    assert len(prompts(records=records, limit=6, max_length=7, epochs=1).take(100)) == 8


def test_an_example_may_fill_the_context():
    limited = encoder(limit=7)
    assert len(ExampleStream(RECORDS, limited, seed=0).take(100)) == 7


def test_a_bad_record_is_named():
    with pytest.raises(ValueError, match=r"record 7 \(from 0\): has no 'output'; it has: input, result"):
        prompts(records=[*RECORDS, {"input": "1", "result": "2"}])


def test_bad_records_may_be_skipped():
    stream = prompts(records=[{"input": "1", "result": "2"}, *RECORDS], bad="drop", epochs=1)
    assert stream.dropped_at_start == 1
    assert sorted(answers(stream.take(100))) == [str(i) for i in range(1, 8)]
    with refused(("data", "bad-record")):
        prompts(records=[{"input": "1"}], bad="drop")


def test_an_expected_answer_that_cannot_be_judged_by_is_a_bad_record():
    records = [*RECORDS, {"input": "1+1=", "output": "x**2 + 1"}]
    late = AnswerCheck(answer_check({"addition": EnvironmentConfig(kind="math")}, "addition").check, at_start=3)
    stream = prompts(records=records, check=late, shuffle=False)
    with pytest.raises(ValueError, match=r"record 7 \(from 0\): got 'x\*\*2 \+ 1'"):
        stream.take(8)
    assert len(prompts(records=records, check=late, bad="drop", epochs=1).take(100)) == 7
    with refused(("data", "bad-record")):
        prompts(records=records[4:], check=AnswerCheck(late.check, at_start=10))


def test_a_prompt_without_an_answer_where_none_is_needed():
    records = [{"input": "1+1="}, {"input": "2+1=", "output": 3}]
    stream = PromptStream(records, encoder(), seed=0, max_length=100, shuffle=False, answered=False)
    assert [prompt.task for prompt in stream.take(2)] == [{"text": "1+1="}, {"text": "2+1=", "answer": "3"}]


def test_examples_to_learn_from():
    example = ExampleStream(RECORDS, encoder(), seed=0, shuffle=False).take(3)[2]
    assert TOKENIZER.decode(example.tokens) == "<s>2+1=3</s>"
    assert example.loss_mask.tolist() == [False] * 5 + [True] * 2
    assert example.advantages.tolist() == example.logprobs.tolist() == [0.0] * 7


def test_an_answer_with_unknown_text_has_one_sentence_of_advice():
    records = [{"input": "1+1=", "output": "\N{GRINNING FACE}"}, *RECORDS]
    with refused(("data", "bad-record")) as error:
        ExampleStream(records, encoder(), seed=0)
    assert str(error.value).count("Try ") == 1 and "unknown_tokens=keep or data.unknown_tokens=drop" in str(error.value)
    with refused(("data", "bad-record")) as error:
        ExampleStream(records[:1], encoder(), seed=0)
    assert str(error.value).count("Try ") == 1 and "drop" not in str(error.value)


class Strange(list):
    """Records whose reading fails with an error of another kind at one place."""

    def __getitem__(self, index):
        if index == 2:
            raise KeyError("no such column")
        return super().__getitem__(index)


@pytest.mark.parametrize("wrong", ["template", "type", "reading", "surrogate"])
def test_whatever_a_record_raises_is_its_own_error_also_behind_those_checked_at_the_start(monkeypatch, caplog, wrong):
    monkeypatch.setattr(stream, "CHECKED_AT_START", 1)
    template = "{% for m in messages %}{{ m.content }}{% if m.content == '2' %}{{ FAULT }}{% endif %}{% endfor %}|"
    fault = {"template": "raise_exception('no two')", "type": "m.content + 1"}.get(wrong, "''")
    tokenizer = load_tokenizer(TokenizerConfig(name=str(RECIPES / "tiny"), chat_template=template.replace("FAULT", fault)))
    records = [{"input": str(i), "output": "1"} for i in range(4)]
    records[2] = {"input": "2\ud800", "output": "1"} if wrong == "surrogate" else records[2]
    records = Strange(records) if wrong == "reading" else records
    for choice in ("error", "drop"):
        data = DataConfig(bad_records=choice, unknown_tokens="keep", max_input_seq_length=100)
        prompts = PromptStream(records, Encoder(tokenizer, TokenizerConfig(), data, DatasetConfig()), seed=0, shuffle=False)
        assert len(prompts.take(2)) == 2
        if choice == "error":
            with refused(("data", "bad-record")) as error:
                prompts.take(1)
            assert "record 2 (from 0)" in str(error.value) and "data.bad_records=drop" in str(error.value)
        else:
            assert len(prompts.take(3)) == 1
            assert prompts.dropped == 1
            assert "data.bad_records=drop: records skipped so far: 1," in caplog.text
