"""A sample in the tokens of a teacher: its prompt, its answer and its end, and what the loss then counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from pipeline.algorithms.advantages import make_sample
from pipeline.config import PolicyConfig, TokenizerConfig
from pipeline.data.teacher_text import NotAligned, TeacherText
from pipeline.types import Completion, Prompt, Rollout, Sample, TeacherTokens, Turn, VersionSpan
from tests.data.made_tokenizers import END, MARK, trained

CHATML = "{% for m in messages %}<|mark|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|mark|>assistant\n{% endif %}"
LLAMA2 = "{% for m in messages %}{% if m.role == 'user' %}[I] {{ m.content }} [/I]{% else %} {{ m.content }}<|end|>{% endif %}"
LLAMA2 += "{% endfor %}"
PLAIN, CHAT = {"text": "the nation is"}, {"messages": [{"role": "user", "content": "the 1234?"}]}


class Side:
    """A tokenizer, and a model's configuration that names it."""

    def __init__(self, folder: Path, kind: str, template: str | None = None, longest: int = 200) -> None:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=trained(kind).backend_tokenizer, eos_token=END, unk_token=trained(kind).unk_token
        )
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        end: Any = tokenizer.convert_tokens_to_ids(END)  # typed as for a batch of tokens
        self.tokenizer, self.end = tokenizer, int(end)
        config = TokenizerConfig(str(folder))
        self.model = PolicyConfig(model_name=str(folder), tokenizer=config, max_total_sequence_length=longest)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


def sides(tmp_path: Path, student: dict[str, Any], teacher: dict[str, Any]) -> tuple[Side, Side, TeacherText]:
    first, second = (Side(tmp_path / name, **given) for name, given in (("student", student), ("teacher", teacher)))
    chat = second.tokenizer.chat_template is not None
    return first, second, TeacherText(first.model, first.tokenizer, second.model, second.tokenizer, chat)


def sampled(tokens: list[int], finish: str = "stop", task: dict[str, Any] = PLAIN) -> tuple[Prompt, Rollout, Sample]:
    drawn = np.asarray(tokens, np.int32)
    completion = Completion("0", drawn, np.full(len(drawn), -0.5, np.float32), (VersionSpan(0, len(drawn)),), finish)
    prompt, rollout = Prompt(0, np.array([5, 6], np.int32), "any", task), Rollout((Turn(completion),), 0.0)
    return prompt, rollout, make_sample(prompt, rollout, 0.0, 0.0)


def written(sample: Sample) -> TeacherTokens:
    assert sample.in_teacher is not None
    return sample.in_teacher


def chunks_of(teacher: Side, sample: Sample) -> tuple[str, list[str], list[list[int]]]:
    """Return what the teacher reads: the text before its first chunk, each chunk, and the places of our tokens in it."""
    tokens, numbers = written(sample).tokens, written(sample).chunks
    counted = sorted({*numbers.tolist()} - {-1})
    texts = [teacher.tokenizer.decode(tokens[numbers == number]) for number in counted]
    first = int(np.flatnonzero(numbers == counted[0])[0]) if counted else len(tokens)
    own = [np.flatnonzero(written(sample).chunks_of_sample == number).tolist() for number in counted]
    return str(teacher.tokenizer.decode(tokens[:first])), texts, own


@pytest.mark.parametrize(
    ("kind", "template", "before"),
    [
        ("bytes, 400 tokens", None, "the nation is"),
        ("sentencepiece", None, "the nation is"),
        ("bytes, 400 tokens", CHATML, "<|mark|>user\nthe 1234?<|end|>\n<|mark|>assistant\n"),
        ("sentencepiece", LLAMA2, "[I] the 1234? [/I]"),
    ],
)
def test_an_answer_with_its_end(tmp_path: Path, kind: str, template: str | None, before: str) -> None:
    """All tokens count; the end of one tokenizer is that of the other; the prompt is the teacher's own."""
    given = {"kind": "bytes, 300 tokens", "template": CHATML if template else None}
    student, teacher, text = sides(tmp_path, given, {"kind": kind, "template": template})
    answer = "the nation 日本😀 ding über été\n"
    tokens = [*student.ids(answer), student.end]
    sample = text.write(*sampled(tokens, task=CHAT if template else PLAIN))
    read, texts, own = chunks_of(teacher, sample)
    assert read == before and sample.loss_mask.sum() == len(tokens)
    assert written(sample).tokens[-1] == teacher.end
    assert texts[-1] == END and own[-1] == [1 + len(tokens)]
    assert sorted(place for places in own for place in places) == list(range(2, 2 + len(tokens)))
    if kind == "sentencepiece" and template:  # the space of its template is part of its first token, and no text of ours
        first = written(sample).tokens[written(sample).chunks == 0]
        assert teacher.tokenizer.convert_ids_to_tokens(int(first[0])).startswith("▁")
    assert len(texts) > 5 and any(len(places) > 1 for places in own)


def test_a_space_that_the_students_template_writes_is_no_part_of_the_answer(tmp_path: Path) -> None:
    student, teacher, text = sides(
        tmp_path, {"kind": "sentencepiece", "template": LLAMA2}, {"kind": "bytes, 400 tokens", "template": CHATML}
    )
    tokens = student.ids("the nation")  # it puts the space before the text
    assert student.tokenizer.convert_ids_to_tokens(tokens[0]).startswith("▁")
    sample = text.write(*sampled([*tokens, student.end], task=CHAT))
    read, texts, _ = chunks_of(teacher, sample)
    assert read.endswith("assistant\n") and "".join(texts) == f"the nation{END}" and sample.loss_mask[2:].all()


def test_a_cut_answer_has_no_end_and_half_a_character_does_not_count(tmp_path: Path) -> None:
    student, teacher, text = sides(tmp_path, {"kind": "bytes, 300 tokens"}, {"kind": "bytes, 400 tokens"})
    whole = student.ids("the é😀")
    sample = text.write(*sampled(whole[:-1], finish="length"))
    _, texts, own = chunks_of(teacher, sample)
    assert "".join(texts) == "the é" and teacher.end not in written(sample).tokens
    broken = [place for place in range(2, len(sample.tokens)) if place not in [p for places in own for p in places]]
    assert broken and sample.loss_mask.tolist() == [
        False,
        False,
        *(place not in broken for place in range(2, len(sample.tokens))),
    ]
    assert (sample.logprobs[~sample.loss_mask] == 0).all()


def test_special_tokens_that_the_student_writes_are_text_to_the_teacher(tmp_path: Path) -> None:
    student, teacher, text = sides(tmp_path, {"kind": "bytes, 300 tokens"}, {"kind": "bytes, 400 tokens"})
    mark = student.tokenizer.convert_tokens_to_ids(MARK)
    sample = text.write(*sampled([*student.ids("the "), mark, *student.ids(" die"), student.end]))
    _, texts, own = chunks_of(teacher, sample)
    assert "".join(texts) == f"the {MARK} die{END}" and sample.loss_mask[2:].all()
    of_mark = written(sample).chunks == written(sample).chunks_of_sample[sample.tokens.tolist().index(mark)]
    assert of_mark.sum() > 1 and own
    assert teacher.tokenizer.convert_tokens_to_ids(MARK) not in written(sample).tokens


def test_unknown_tokens_of_the_teacher_do_not_count(tmp_path: Path) -> None:
    student, teacher, text = sides(tmp_path, {"kind": "bytes, 300 tokens"}, {"kind": "letters"})
    sample = text.write(*sampled([*student.ids("the XY thing"), student.end]))
    _, texts, _ = chunks_of(teacher, sample)
    assert (
        "".join(texts).replace(END, "") in ("the  thing", "the thing", "thething")
        and 0 < sample.loss_mask.sum() < len(sample.tokens) - 2
    )


def test_text_that_the_teachers_tokenizer_changes(tmp_path: Path) -> None:
    """A normal form is the same text; a chunk in which the tokenizer drops a character does not count."""
    student, teacher, text = sides(tmp_path, {"kind": "bytes, 300 tokens"}, {"kind": "bytes, 400 tokens, normalized"})
    tokens = student.ids("the e\u0301t\u00e9 \u00bd #thing")
    sample = text.write(*sampled([*tokens, student.end]))
    _, texts, _ = chunks_of(teacher, sample)
    assert "".join(texts).startswith("the \u00e9t\u00e9 1\u20442") and texts[-1] == END
    spelled = [student.tokenizer.decode([token]) for token in tokens]
    lost = [place for place, learned in enumerate(sample.loss_mask[2:-1]) if not learned]
    assert "".join(spelled[place] for place in lost) in (" #thing", "#thing", "#")


def test_thoughts_that_were_cut(tmp_path: Path) -> None:
    """The inserted end of thinking is text, from which nothing is learned."""
    student, teacher, text = sides(tmp_path, {"kind": "bytes, 300 tokens"}, {"kind": "bytes, 400 tokens"})
    prompt, rollout, _ = sampled([*student.ids("the thing"), student.end])
    (answer,) = rollout.turns
    thought = dataclasses.replace(answer.completion, tokens=np.asarray(student.ids("ding"), np.int32), finish="length")
    thought = dataclasses.replace(thought, logprobs=np.zeros(len(thought.tokens), np.float32))
    inserted = np.asarray(student.ids("\nSo: "), np.int32)
    rollout = dataclasses.replace(rollout, turns=(Turn(thought, inserted, thinking=True), answer))
    sample = text.write(prompt, rollout, make_sample(prompt, rollout, 0.0, 0.0))
    _, texts, own = chunks_of(teacher, sample)
    assert "ding\nSo: the thing<|end|>".startswith(texts[0]) and texts[-1] == END
    begin = 2 + len(thought.tokens)
    learned = {place for places in own for place in places}
    assert not learned & set(range(begin, begin + len(inserted))) and sample.loss_mask[sorted(learned)].all()


def test_what_no_teacher_can_score(tmp_path: Path) -> None:
    student, _, text = sides(tmp_path, {"kind": "bytes, 300 tokens"}, {"kind": "bytes, 400 tokens", "longest": 12})
    prompt, rollout, sample = sampled([*student.ids("the thing in the nation bade a dab, caddie! " * 3), student.end])
    with pytest.raises(NotAligned, match="expected at most 12"):
        text.write(prompt, rollout, sample)
    turn = dataclasses.replace(rollout.turns[0], observation=np.array([7], np.int32))
    with pytest.raises(NotAligned, match="several turns"):
        text.write(prompt, dataclasses.replace(rollout, turns=(turn, rollout.turns[0])), sample)
