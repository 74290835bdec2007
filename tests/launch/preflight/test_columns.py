"""Data files in common formats: the columns that are read, and the errors for those that cannot be read."""

import json

import pytest

from launch.preflight import data_files, data_records, input_files, model_weights
from pipeline import config

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
KTO = ("algorithm=kto",)
CHAT = ("data.apply_chat_template=true", "policy.tokenizer.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'")
ANY_ANSWER = ("data.train.output_key=output",)  # tiny_grpo names a column of its own


def examined(folder, algorithm: str, rows: list[dict] | str, *overrides: str) -> tuple[list[str], list[str]]:
    """Return (problems, notes) of tiny_ALGORITHM with these rows."""
    path = folder / "rows.jsonl"
    path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    own = ("data.train.dataset_name=null", f"data.train.data_path={path}", "data.train.margin_key=null", "needs=[]")
    model = (f"policy.model_name={config.RECIPES}/tiny", "policy.random_init=true")
    recipe = config.load(f"tiny_{algorithm}", [*own, *model, *overrides])
    notes: list[str] = []
    return [str(each).replace(f"{path}", "F") for each in input_files.problems(recipe, notes=notes)], notes


@pytest.mark.parametrize(
    ("algorithm", "row", "overrides", "told"),
    [
        ("sft", {"prompt": "a", "completion": "b"}, (), "'prompt' as the prompt and 'completion' as the answer"),
        ("sft", {"text": "a"}, (), "'text' as a text (every token counts in the loss)"),
        ("sft", {"messages": [USER, ASSISTANT]}, CHAT, "'messages' as a conversation"),
        ("sft", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, CHAT, "'conversations'"),
        ("sft", {"prompt": [USER], "completion": [ASSISTANT]}, CHAT, "'prompt' as the prompt"),
        ("sft", {"prompt": "a", "completion": "b"}, CHAT, "rendered by the chat template; data.apply_chat_template=false uses"),
        ("grpo", {"prompt": "a", "answer": "b"}, (), "'prompt' as the prompt and 'answer' as the answer"),
        ("grpo", {"question": "a", "solution": "s", "answer": 4}, ANY_ANSWER, "'question' as the prompt and 'answer' as"),
        ("grpo", {"messages": [USER, ASSISTANT]}, (*ANY_ANSWER, *CHAT), "'messages' as a conversation"),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, (), "'prompt' as the prompt"),
        (
            "dpo",
            {"prompt": "a", "completion": "b", "label": False},
            KTO,
            "'prompt' as the prompt and 'completion' as the answer",
        ),
        (
            "dpo",
            {"prompt": [USER], "completion": [ASSISTANT], "label": 1},
            (*KTO, *CHAT),
            "'prompt' as the prompt and 'completion' as",
        ),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, KTO, "'prompt' as the prompt"),
        ("rm", {"chosen": "a b", "rejected": "a c"}, (), "the common beginning of both answers as the prompt"),
        ("dpo", {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [ASSISTANT | {"content": "no"}]}, CHAT, "'prompt'"),
    ],
)
def test_common_columns_are_read_and_noted(tmp_path, algorithm, row, overrides, told):
    problems, notes = examined(tmp_path, algorithm, [row], *overrides)
    assert problems == []
    note, *others = notes
    assert note.startswith("data.train: reads ") and told in note
    kind, other = ("good", "bad") if row.get("label") in (1, True) else ("bad", "good")
    assert others == ([f"data.train: the first answer is {kind}; kto needs {other} ones too"] if "label" in row else [])


def test_answers_with_both_labels_have_no_note(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False, True)]
    problems, notes = examined(tmp_path, "dpo", rows, *KTO)
    assert problems == [] and len(notes) == 1


@pytest.mark.parametrize(
    ("algorithm", "rows", "overrides", "says"),
    [
        ("sft", [{"q": "a", "a": "b", "n": 1}] * 3, (), "F:1: no column 'input' or 'output' with a string or messages; there"
         " are: q, a, n. Try data.train.input_key=q data.train.output_key=a"),
        ("grpo", [{"source": "s", "prompt": "a", "gold": "b"}], ANY_ANSWER, "Try data.train.input_key=prompt"
         " data.train.output_key=gold"),
        ("sft", [{"id": 1, "gold": "b", "source": "s", "x": "a"}], (), "Try data.train.input_key=x data.train.output_key=gold"),
        ("grpo", [{"input": "a", "answer": ["assert f(1) == 2"]}], (), "no column 'answer' with a string or messages; there"
         " are: input, answer (a list). Try"),
        ("sft", [{"problem": "a", "solution": "b", "answer": "c"}], (), "can be read in 2 ways; expected one. Try"
         " data.train.input_key=problem data.train.output_key=solution or data.train.input_key=problem"
         " data.train.output_key=answer"),
        ("sft", [{"instruction": "a", "input": "b", "output": "c"}], (), "(instruction, input, output) can be read in 2 ways"),
        ("sft", [{"messages": [USER, ASSISTANT]}], (*CHAT, "data.train.output_key=solution"),
         "Try data.train.messages_key=messages"),
        ("grpo", [{"messages": [USER], "gold": "4"}], CHAT, "Try data.train.messages_key=messages data.train.output_key=gold"),
        ("sft", [{"messages": [USER, ASSISTANT]}], (), "F:1: 'messages' is a conversation, which needs a chat template"),
        ("dpo", [{"question": "a", "better": "b", "worse": "c"}], (), "Try data.train.input_key=question"
         " data.train.chosen_key=better data.train.rejected_key=worse"),
        ("dpo", [{"chosen": "a b", "rejected": "a c"}], CHAT, "=false, which takes the common beginning"),
        ("grpo", [{"question": "a", "solution": "b"}], (), "no column 'input' or 'answer' with a string or messages; there are:"
         " question, solution. Try data.train.input_key=question data.train.output_key=solution"),
        ("sft", [{"prompt": "a", "completion": "b"}, *[{"text": "a"}] * 2, {"prompt": "a", "completion": "b"}, {"text": "a"}],
         (), "F:2: has no 'prompt'; it has: text. Try to fix it, or data.bad_records=drop (and in 2 more: lines 3, 5)"),
        ("sft", '{"text": "a"}\n{"text": \n{"text": "a"}\n', (), "F:2: not JSON: Input data was truncated"),
        ("sft", "", (), "F is empty"),
        ("sft", "\n \n", (), "F is empty"),
        ("sft", '[["a"]]', (), "F:1: got a list; expected a JSON object. Try one record a line: jq"),
        ("sft", "\ufeff" + '{"text": "a"}\n', (), "F:1: not JSON: a byte order mark at its beginning"),
        ("sft", '{"text": NaN}\n', (), "F:1: not JSON"),
        ("sft", [{"input": "a", "output": None}] * 2, (), "F:1: no column 'output' with a string"),
    ],
)  # fmt: skip
def test_unreadable_rows_are_refused_with_keys_and_lines(tmp_path, algorithm, rows, overrides, says):
    (problem,), _ = examined(tmp_path, algorithm, rows, *overrides)
    assert says in str(problem)


def test_expected_answers_that_cannot_be_judged_by_are_refused_or_dropped(tmp_path):
    rows = [{"input": "a=", "answer": "assert f(1) == 2"}, {"input": "a=", "answer": "3"}, {"input": "a=", "answer": "4"}]
    kind = ("env.sums={kind: code}", "data.train.env_name=sums")
    problems, _ = examined(tmp_path, "grpo", rows, *kind)
    assert [problem.partition(": the snippet")[0] for problem in problems] == [
        "data.train.data_path: F:2: 'answer': env.sums cannot use it as the expected answer",
        "data.train.data_path: F:3: 'answer': env.sums cannot use it as the expected answer",
    ]
    assert examined(tmp_path, "grpo", rows, *kind, "data.bad_records=drop")[0] == []
    rows = [{"input": "a=", "answer": "$x^2$"}, {"input": "a=", "answer": "x**2 + 1"}, {"input": "a=", "answer": "42"}]
    kind = ("env.sums={kind: math}", "data.train.env_name=sums")
    (problem,), _ = examined(tmp_path, "grpo", rows, *kind)
    assert problem.startswith(
        "data.train.data_path: F:2: 'answer': env.sums cannot use it as the expected answer: got 'x**2 + 1'"
    )
    assert examined(tmp_path, "grpo", rows, *kind, "data.bad_records=drop")[0] == []


@pytest.mark.parametrize(
    ("row", "key", "hint"),
    [
        ({"tools": []}, "tool", ". Did you mean tools?"),
        ({"meta": {"tools": []}}, "meta.tool", ". Did you mean meta.tools?"),
        ({"tools": []}, "functions", ""),
    ],
)
def test_a_column_of_tools_that_no_record_has_is_noted(tmp_path, row, key, hint):
    rows = [{"prompt": [USER], "completion": [ASSISTANT], **row}]
    problems, notes = examined(tmp_path, "sft", rows, f"data.train.tools_key={key}", *CHAT)
    assert problems == []
    told = f"data.train.tools_key: none of the first 1 records has tools in '{key}'; their prompts list no tools{hint}"
    assert [note for note in notes if "tools_key" in note] == [told]
    problems, notes = examined(tmp_path, "sft", [{**rows[0], key: "[]"}], f"data.train.tools_key={key}", *CHAT)
    assert problems == [] and "tools_key" not in " ".join(notes)


def test_a_margin_is_refused_where_nothing_learns_from_it():
    for algorithm in ("grpo", "dpo", "sft"):
        with pytest.raises(config.RecipeError) as caught:
            config.load(f"tiny_{algorithm}", ["data.train.margin_key=margin"])
        assert [(one.key, one.code) for one in caught.value.problems] == [("data.train.margin_key", "unsupported")]


@pytest.mark.parametrize(
    ("algorithm", "override", "says"),
    [
        ("grpo", "data.train.output_key=target", "data.train.dataset_name: scratchpad_addition, row 0 (from 0): no column"
         " 'target' with a string or messages; there are: input, output, answer. Try data.train.output_key=answer; no record"),
        ("sft", "data.train.output_key=target", "Try data.train.output_key=output; no record can be used"),
        ("dpo", "data.validation.chosen_key=good", "Try data.validation.chosen_key=chosen; no record can be used"),
        ("grpo", "data.train.kwargs.digits=[0]", "data.train: scratchpad: got digits [0]; expected numbers of at least 1"),
        ("grpo", "data.train.kwargs.sizes=3", "data.train: dataset_name 'pipeline.data.scratchpad.addition': the call"),
        ("calculator", "data.train.split=test", "data.train: calculator_multiplication: got split 'test'; expected train or"),
        ("puzzle", "data.train.output_key=target", "Try data.train.output_key=answer; no record can be used"),
    ],
)  # fmt: skip
def test_columns_and_arguments_of_generated_data_are_checked(algorithm, override, says):
    model = (f"policy.model_name={config.RECIPES}/tiny", "policy.random_init=true", "needs=[]")
    assert list(input_files.problems(config.load(f"tiny_{algorithm}", model))) == []
    (problem,) = input_files.problems(config.load(f"tiny_{algorithm}", [*model, override]))
    assert says in str(problem)


def test_generated_data_that_take_too_long_here_are_left_to_the_job():
    model = (f"policy.model_name={config.RECIPES}/tiny", "policy.random_init=true", "needs=[]")
    notes: list[str] = []
    recipe = config.load("tiny_grpo", [*model, "data.train.kwargs.digits=[9999]"])
    assert list(input_files.problems(recipe, notes=notes)) == []
    assert any(note.startswith("data.train: only the job generates its records: here it raised ValueError") for note in notes)


def test_dropping_rows_is_not_advised_if_none_would_remain(tmp_path):
    rows = [{"input": "a", "chosen": "b", "rejected": "b"}] * 3
    (problem,), _ = examined(tmp_path, "dpo", rows)
    assert problem.endswith("no record can be used (and in 2 more: lines 2, 3)")
    (problem,), _ = examined(tmp_path, "dpo", rows, "data.bad_records=drop")
    assert "are the same; expected two different answers; no record" in problem
    good = {"input": "a", "chosen": "b", "rejected": "c"}
    assert examined(tmp_path, "dpo", [*rows, good], "data.bad_records=drop") == ([], [])


def test_lines_that_are_not_json_are_dropped_but_not_all(tmp_path):
    wrong, good = "{'text': 1}\n[]\n", '{"text": "a"}\n'
    problems, _ = examined(tmp_path, "sft", wrong + good)
    assert len(problems) == 2 and all("data.bad_records=drop" in problem for problem in problems)
    assert examined(tmp_path, "sft", wrong + good, "data.bad_records=drop")[0] == []
    problems, _ = examined(tmp_path, "sft", wrong, "data.bad_records=drop")
    assert len(problems) == 2 and all("no record can be used" in problem for problem in problems)


@pytest.mark.parametrize("overlong_first", [False, True])
def test_a_line_beyond_the_bound_ends_the_check_where_it_may_be_dropped(tmp_path, monkeypatch, overlong_first):
    monkeypatch.setattr(data_files, "SCAN_LINE", 1000)
    lines = ['{"text": "a"}\n', '{"text": "' + "a" * 2000 + '"}\n']
    rows = "".join(reversed(lines) if overlong_first else lines)
    (problem,), _ = examined(tmp_path, "sft", rows)
    assert "has more than" in problem
    assert examined(tmp_path, "sft", rows, "data.bad_records=drop")[0] == []


def test_a_teachers_weights_are_needed_even_with_random_policy_weights(tmp_path):
    tiny = f"{config.RECIPES}/tiny"
    own = (f"policy.model_name={tiny}", "policy.random_init=true", f"teacher.model_name={tiny}", "needs=[]")
    (problem,) = model_weights.problems(config.load("tiny_distillation", own))
    assert (problem.key, problem.code) == ("teacher.model_name", "file-not-found")


@pytest.mark.parametrize(
    ("algorithm", "row", "key"),
    [
        ("grpo", {"answer": "1"}, "input"),
        ("sft", {"prompt": "a="}, "completion"),
        ("dpo", {"prompt": "a=", "rejected": "b"}, "chosen"),
    ],
)
def test_unknown_text_is_named_and_may_be_kept(tmp_path, algorithm, row, key):
    rows = [row | {key: "1"}, row | {key: "BIG"}]
    (problem,), _ = examined(tmp_path, algorithm, rows)
    assert problem.startswith("data.train.data_path: F:2: the tokenizer in ")
    assert "does not know 'B', 'I', 'G', which becomes <unk> (in 1 of the 2 records checked)" in problem
    for choice in ("keep", "drop"):
        assert examined(tmp_path, algorithm, rows, f"data.unknown_tokens={choice}")[0] == []


@pytest.mark.parametrize(
    ("algorithm", "row", "says"),
    [
        ("sft", {"messages": [USER, ASSISTANT | {"content": "1" * 40}]}, "F:2: a sequence of 42 tokens"),
        ("grpo", {"prompt": [USER | {"content": "1" * 40}], "answer": "1"}, "F:2: a prompt of 40 tokens"),
    ],
)
def test_conversations_are_counted_with_the_chat_template(tmp_path, algorithm, row, says):
    short = {"messages": [USER, ASSISTANT]} if algorithm == "sft" else {"prompt": [USER], "answer": "1"}
    given = ("data.max_input_seq_length=30", "data.unknown_tokens=keep", *CHAT, *(ANY_ANSWER if algorithm == "grpo" else ()))
    problems, _ = examined(tmp_path, algorithm, [short, row], *given)
    (problem,) = [problem for problem in problems if "data.train" in problem]
    assert says in problem
    assert examined(tmp_path, algorithm, [short, row], *given, "data.overlong_prompts=drop")[0] == []


def test_a_record_that_is_too_long_to_encode_here_hides_no_other(tmp_path):
    rows = [{"input": "a=", "output": "1" * 3_000_000}, *({"input": "a=", "output": "1"} for _ in range(300))]
    (problem,), notes = examined(tmp_path, "sft", [*rows, {"input": "a=", "output": "B"}], "data.overlong_prompts=drop")
    assert problem.startswith("data.train.data_path: F:302: the tokenizer in ") and "does not know 'B'" in problem
    assert "data.train: only the job checks that the tokenizer encodes 1 record of more than 131,072 characters" in notes


def test_the_longest_records_are_those_with_the_longest_texts(tmp_path):
    """Columns that nothing reads do not count for the length of a record."""
    rows = [{"input": "a=", "answer": "1", "solution": "x" * 500} for _ in range(700)]
    rows[400] = {"input": "1" * 40, "answer": "1", "solution": ""}
    (problem,), _ = examined(tmp_path, "grpo", rows)
    assert "F:401: a prompt of 41 tokens" in problem


def test_more_new_tokens_than_the_context_are_refused(tmp_path):
    problems, notes = examined(tmp_path, "grpo", [{"input": "a=", "answer": "1"}], "policy.generation.max_new_tokens=64")
    assert problems == []
    (note,) = notes
    assert note.startswith("policy.generation.max_new_tokens: 64 is above policy.max_total_sequence_length=32")


# ---- pairs, which the job reads by the same code: tests/data/test_preferences.py ---------------------------------------------

PAIR = {"input": "1+1=", "chosen": "2", "rejected": "3", "gap": 1}
WRONG = ASSISTANT | {"content": "no"}


@pytest.mark.parametrize(
    ("row", "overrides"),
    [
        (PAIR, ()),
        (PAIR, CHAT),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, WRONG]}, CHAT),
        ({"input": "a", "chosen": [ASSISTANT], "rejected": [WRONG]}, CHAT),
        ({"prompt": [USER], "chosen": "b", "rejected": "c"}, (*CHAT, "data.train.messages_key=prompt")),
    ],
)
@pytest.mark.parametrize("algorithm", ["dpo", "rm"])
def test_good_pairs(tmp_path, row, overrides, algorithm):
    assert examined(tmp_path, algorithm, [row], *overrides)[0] == []


def test_good_pairs_with_a_margin(tmp_path):
    assert examined(tmp_path, "rm", [PAIR], "data.train.margin_key=gap")[0] == []


@pytest.mark.parametrize(
    ("row", "overrides", "says"),
    [
        ({"input": "1", "chosen": "2"}, (), "has no 'rejected'; it has: input, chosen"),
        (PAIR | {"chosen": [ASSISTANT]}, CHAT, "one of 'chosen' and 'rejected' is a list of messages and the other is not"),
        (PAIR | {"gap": "wide"}, ("data.train.margin_key=gap",), "'gap' is 'wide', not a finite number"),
        (PAIR | {"input": "1+" * 40}, ("data.max_input_seq_length=30",), "a sequence of 83 tokens"),
    ],
)
def test_bad_pairs(tmp_path, row, overrides, says):
    (problem,), _ = examined(tmp_path, "rm", [PAIR, row], *overrides)
    assert "F:2: " in problem and says in problem


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("algorithm", "row"),
    [
        ("sft", {"messages": [USER, USER, ASSISTANT]}),
        ("grpo", {"prompt": [USER, USER], "answer": "b"}),
        ("dpo", {"prompt": [USER, USER], "chosen": [ASSISTANT], "rejected": [ASSISTANT | {"content": "no"}]}),
    ],
)
def test_a_record_that_the_template_refuses_is_named_before_submission(tmp_path, algorithm, row):
    good = {name: value[-1:] if name == "prompt" else value for name, value in row.items()}
    good = {"messages": [USER, ASSISTANT]} if "messages" in row else good
    key = f'policy.tokenizer.chat_template="{ALTERNATING}"'
    chat = ("data.apply_chat_template=true", key, *(ANY_ANSWER if algorithm == "grpo" else ()))
    problems, _ = examined(tmp_path, algorithm, [good, row, good], *chat)
    assert [problem for problem in problems if "F:2: the chat template refuses" in problem and "must alternate" in problem]
    assert examined(tmp_path, algorithm, [good, row, good], *chat, "data.bad_records=drop")[0] == []
    assert examined(tmp_path, algorithm, [row, row], *chat, "data.bad_records=drop")[0] != []


def test_an_error_of_the_check_itself_is_noted(tmp_path, monkeypatch):
    """The tokenizer of the job may encode what the stand-in of this check cannot."""
    monkeypatch.setattr(data_records, "_sequences", lambda *given: {}["absent"])
    problems, notes = examined(tmp_path, "sft", [{"input": "a=", "output": "1"}])
    assert problems == []
    assert "policy.tokenizer: only the job checks that it encodes the records: here KeyError: 'absent'" in notes
