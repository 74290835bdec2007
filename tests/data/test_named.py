"""The named data sets, from files with their columns to the items of a step."""

import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pytest
from transformers import AutoTokenizer

from pipeline.config import (
    NAMED_DATASETS,
    RECIPES,
    DataConfig,
    DatasetConfig,
    EnvironmentConfig,
    PolicyConfig,
    Recipe,
    TokenizerConfig,
    validates,
)
from pipeline.config.data import check_data
from pipeline.data.datasets import load_records, load_split
from pipeline.data.mixture import build_streams
from pipeline.data.named import READERS
from tests.data import hub, named_rows
from tests.problems import named, refused

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}#{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
LAST_LINE = "solve: {}\n\nanswer: last"


@pytest.fixture(scope="module", autouse=True)
def _hub(tmp_path_factory: pytest.TempPathFactory):
    caches = tmp_path_factory.mktemp("hf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(caches / "hub"))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", caches / "datasets")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        named_rows.download_all(caches / "hub")
        yield


def a_recipe(algorithm: str, validation: DatasetConfig | None = None, data: dict[str, Any] | None = None, **dataset) -> Recipe:
    tokenizer = TokenizerConfig(name=str(RECIPES / "tiny"), chat_template=TEMPLATE)
    judged = {"env_name": "math"} if algorithm in ("grpo", "ppo") else {}
    train = DatasetConfig(**{**judged, **dataset})
    return Recipe(
        name="a",
        algorithm=algorithm,
        run_dir="a",
        policy=PolicyConfig(model_name="a", tokenizer=tokenizer, max_total_sequence_length=2000),
        data=DataConfig(train=train, validation=validation, max_input_seq_length=2000, shuffle=False, **(data or {})),
        env={"math": EnvironmentConfig(kind="math")},
    )


def streams(*args: Any, **options: Any) -> tuple[Any, list]:
    recipe = a_recipe(*args, **options)
    assert list(check_data(recipe)) == []
    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "tiny")
    tokenizer.chat_template = TEMPLATE
    return build_streams(recipe, tokenizer)


def epoch(stream: Any) -> list:
    """Return every item once."""
    return stream.take(stream.state_dict()["records"] - stream.dropped_at_start)


def text(tokens: Any) -> str:
    return AutoTokenizer.from_pretrained(RECIPES / "tiny").decode(tokens)


ASKED = {  # prompts and the answers that are expected
    "AIME2024": [("20+4=", "24"), ("10+1=", "011")],
    "AIME2025": [("10+2=", "12"), ("10+3=", "13")],
    "AIME2026": [("270+7=", "277")],
    "DAPOMath17K": [(LAST_LINE.format("3+1="), "4"), (LAST_LINE.format("3+2="), "5")],
    "DAPOMathAIME2024": [(LAST_LINE.format("30+3="), "33")],
    "DeepScaler": [("1+1=", "2"), ("2+1=", "3")],
    "GSM8K": [("how many?", "1,002")],
    "gsm8k": [("how many?", "1,002")],
    "OpenMathInstruct-2": [(f"{i}+1=", str(i + 1)) for i in range(40)],
    "OpenR1-Math-220k": [("8+8=", "16")],
}
LEARNED = {  # conversations
    "HelpSteer3": [
        "[user]hello#[assistant]hi#[user]how are you?#[assistant]good#",
        "[user]hello#[assistant]hello to you#",
        "[user]hello#[assistant]so#",
    ],
    "Nemotron-Cascade-2-SFT-Math": ["[system]think#[user]5+5=#[assistant]10#"],
    "squad": ["[system]a house is red#[user]what is red?#[assistant]a house#"],
    "tulu3_sft_mixture": [f"[user]say {i}#[assistant]it is {i}#" for i in range(10)],
}
PREFERRED = {  # prompt, chosen, rejected
    "HelpSteer3": [
        ("[user]hello#[assistant]hi#[user]how are you?#[assistant]", "good#", "bad#"),
        ("[user]hello#[assistant]", "hello to you#", "no#"),
    ],
    "Tulu3Preference": [("[user]say#[assistant]yes#[user]more#[assistant]", "more words#", "no#")],
}


def test_every_name_is_tested():
    assert ASKED.keys() | LEARNED.keys() | PREFERRED.keys() == NAMED_DATASETS.keys()
    assert {known.form for known in NAMED_DATASETS.values()} == {"answered", *READERS}


@pytest.mark.parametrize("name", ASKED)
def test_questions(name: str):
    stream, _ = streams("grpo", dataset_name=name)
    prompts = epoch(stream)
    assert [(text(p.tokens), p.task["answer"]) for p in prompts] == [
        (f"[user]{asked}#[assistant]", answer) for asked, answer in ASKED[name]
    ]
    assert {p.environment for p in prompts} == {"math"}


@pytest.mark.parametrize("name", LEARNED)
def test_conversations(name: str):
    stream, _ = streams("sft", dataset_name=name)
    examples = epoch(stream)
    assert [text(example.tokens) for example in examples] == LEARNED[name]
    for example in examples:
        assert text(example.tokens[example.loss_mask]).endswith("#")


@pytest.mark.parametrize("name", PREFERRED)
def test_pairs(name: str):
    stream, _ = streams("dpo", dataset_name=name, data={"bad_records": "drop"})
    assert stream.dropped_at_start == 1  # two answers that are the same, or to two conversations
    found = []
    for chosen, rejected in epoch(stream):
        prompts = {text(one.tokens[~one.loss_mask]) for one in (chosen, rejected)}
        found.append((*prompts, text(chosen.tokens[chosen.loss_mask]), text(rejected.tokens[rejected.loss_mask])))
    assert found == PREFERRED[name]
    with pytest.raises(ValueError, match="are the same" if name == "HelpSteer3" else "not two answers"):
        streams("dpo", dataset_name=name)


def test_prompts_from_conversations():
    """The prompt is all before the last answer, which is expected; `prompt_file` wraps the user's first message."""
    stream, _ = streams("grpo", dataset_name="HelpSteer3")
    prompt = stream.take(1)[0]
    assert text(prompt.tokens) == "[user]hello#[assistant]hi#[user]how are you?#[assistant]"
    assert prompt.task["answer"] == "good"


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_prompt_files(algorithm: str, tmp_path: Path):
    (tmp_path / "prompt.txt").write_text("now: {}!")
    (tmp_path / "system.txt").write_text("be brief\n")
    files = {"prompt_file": str(tmp_path / "prompt.txt"), "system_prompt_file": str(tmp_path / "system.txt")}

    def first(name: str) -> str:
        return text(streams(algorithm, dataset_name=name, **files)[0].take(1)[0].tokens).split("[assistant]")[0]

    assert first("AIME2026") == "[system]be brief#[user]now: 270+7=!#"
    assert first("squad") == "[system]a house is red#[user]now: what is red?!#"
    assert first("HelpSteer3") == "[system]be brief#[user]now: hello!#"


def test_another_answer_subset_and_split():
    stream, _ = streams("sft", dataset_name="OpenMathInstruct-2", output_key="generated_solution", split="train")
    assert [text(example.tokens) for example in epoch(stream)] == ["[user]7+1=#[assistant]it is 8#"]
    for options, asked in (({"split": "test"}, "how many then?"), ({"subset": "socratic"}, "how?")):
        assert load_records(DatasetConfig(dataset_name="gsm8k", **options), seed=0)[0]["input"] == asked
    assert load_records(DatasetConfig(dataset_name="HelpSteer3", split="validation"), seed=0)[0]["chosen"] == "a"


def test_a_repository_is_read_by_its_name_and_columns():
    """Check the same files without the data set's name: a subset, a split, and the recipe's own choice of columns."""
    dataset = DatasetConfig(dataset_name="openai/gsm8k", subset="main", split="test", input_key="question", output_key="answer")
    assert load_records(dataset, seed=0)[0]["question"] == "how many then?"
    for options, message in (
        ({"split": "tst"}, "data.split: got tst; .*test"),
        ({"subset": "min"}, "data.subset: got min; .*main"),
    ):
        with pytest.raises(ValueError, match=message):
            load_records(DatasetConfig(dataset_name="openai/gsm8k", **{"subset": "main", **options}), seed=0)


def test_a_data_set_in_no_cache_is_refused():
    with pytest.raises(ValueError, match=r"'DeepScalr' is neither .*; did you mean DeepScaler\?"):
        load_records(DatasetConfig(dataset_name="DeepScalr"), seed=0)


def test_a_card_without_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`datasets` leaves cards in the hub's cache for data that it keeps elsewhere."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    hub.download(tmp_path, "openai/gsm8k", {})
    with pytest.raises(ValueError, match="'openai/gsm8k' is neither"):
        load_records(DatasetConfig(dataset_name="gsm8k", split="train[:1]"), seed=0)


BAD_ROWS = {
    "gsm8k": ({"question": "how many?", "answer": "two"}, "no ####"),
    "DeepScaler": ({"question": "1+1=", "answer": "2"}, "has no 'problem'; it has: question, answer"),
    "AIME2024": (named_rows.question("1+1=", " "), "'answer' is empty"),
    "DAPOMath17K": ({"prompt": named_rows.turns("1+1=")}, "'reward_model' is not an object"),
    "squad": (named_rows.passage("a", "b"), "'answers' has no text"),
    "tulu3_sft_mixture": ({"messages": named_rows.turns("a", "b", "c")}, "does not end in an answer"),
    "HelpSteer3": (named_rows.preference(None, "a", "b", "c"), "'overall_preference' is None"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_in_other_columns_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row, message = BAD_ROWS[name]
    known = NAMED_DATASETS[name]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    card = hub.configs(**{subset: {"train": "a.jsonl"} for subset in known.subsets})
    hub.download(tmp_path, known.repository, {"a.jsonl": [row]}, card)
    with pytest.raises(ValueError, match=rf"record 0 \(from 0\): .*{message}"):
        streams("sft", dataset_name=name)


# ---- held out, sampled and repeated records -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.05, 0.26, 12.0])
def test_held_out_records_equal_those_of_datasets(size: float):
    dataset = DatasetConfig(dataset_name="OpenMathInstruct-2", split_validation_size=size, seed=5)
    kept, held_out = load_split(dataset, seed=0)
    theirs = datasets.Dataset.from_list(list(load_records(dataset, seed=0))).train_test_split(
        test_size=size if size < 1 else int(size), seed=5
    )
    assert list(kept) == list(theirs["train"]) and list(held_out) == list(theirs["test"])
    assert list(load_split(dataset, seed=9)[1]) == list(held_out)  # the run's seed does not matter


def test_sampled_records_equal_those_of_datasets(tmp_path: Path):
    rows = [{"input": str(i), "output": str(i)} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = DatasetConfig(data_path=str(tmp_path / "a.jsonl"), max_samples=8, seed=3)
    drawn = list(load_records(dataset, seed=0))
    theirs = datasets.Dataset.from_list(rows).shuffle(seed=3).select(range(8))
    assert drawn == list(theirs)
    dataset.split_validation_size = 2
    kept, held_out = load_split(dataset, seed=0)
    split = theirs.train_test_split(test_size=2, seed=3)
    assert (list(kept), list(held_out)) == (list(split["train"]), list(split["test"]))
    dataset.max_samples = 99
    assert len(load_split(dataset, seed=0)[0]) == 28


def test_repeated_records_equal_those_of_datasets():
    records = load_records(DatasetConfig(dataset_name="AIME2024", repeat=16), seed=0)
    assert [record["input"] for record in records] == ["20+4=", "10+1="] * 16


@pytest.mark.parametrize(
    ("algorithm", "name", "size"),
    [
        ("grpo", "OpenMathInstruct-2", 0.2),
        pytest.param("sft", "tulu3_sft_mixture", 3, marks=pytest.mark.full),
        ("dpo", "HelpSteer3", 1),
    ],
)
def test_validation_on_held_out_records(algorithm: str, name: str, size: float):
    options = {"dataset_name": name, "split_validation_size": size, "data": {"bad_records": "drop"}, "seed": 1}
    assert validates(a_recipe(algorithm, **options))
    stream, validation = streams(algorithm, **options)

    def shown(items: list) -> list[str]:
        return [text((item[0] if isinstance(item, tuple) else item).tokens) for item in items]

    trained, validated = shown(epoch(stream)), shown(validation)
    assert validated and trained and not set(trained) & set(validated)
    again, same = streams(algorithm, **options)
    again.load_state_dict(json.loads(json.dumps(streams(algorithm, **options)[0].state_dict())))
    assert (shown(epoch(again)), shown(same)) == (trained, validated)


def test_resumes_among_the_kept_records():
    options = {"dataset_name": "OpenMathInstruct-2", "split_validation_size": 0.25, "repeat": 2}
    whole = [prompt.task["answer"] for prompt in streams("grpo", **options)[0].take(60)]
    assert len(whole) == 60 and whole[:30] == whole[30:]
    first, second = (streams("grpo", **options)[0] for _ in range(2))
    taken = first.take(37)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [prompt.task["answer"] for prompt in [*taken, *second.take(23)]] == whole


def test_holding_out_all_or_nothing_is_refused():
    for size in (40, 99):
        with refused(("data", "too-large")):
            load_split(DatasetConfig(dataset_name="OpenMathInstruct-2", split_validation_size=size), seed=0)


# ---- a user's data set --------------------------------------------------------------------------------------------------


class Numbers:
    """A user's data set."""

    def __init__(self, split: str, seed: int, size: int = 3) -> None:
        self._records = [{"input": f"{split} {i}", "output": str(i + seed)} for i in range(size)]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, str]:
        return self._records[index]


def no_records(split: str, seed: int) -> dict:
    return {"split": split}


def texts(split: str, seed: int) -> list[str]:
    return [split]


def test_a_users_data_set_by_its_dotted_path():
    stream, validation = streams(
        "grpo",
        dataset_name=f"{__name__}.Numbers",
        kwargs={"size": 4, "seed": 7},
        validation=DatasetConfig(dataset_name=f"{__name__}.Numbers", split="test", env_name="math"),
    )
    assert [(text(p.tokens), p.task["answer"]) for p in epoch(stream)] == [
        (f"[user]train {i}#[assistant]", str(i + 7)) for i in range(4)
    ]
    assert [prompt.task["answer"] for prompt in validation] == ["42", "43", "44"]  # the run's seed


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("no_such_package.Numbers", {}, "there is no module no_such_package; looked in "),
        (f"{__name__}.Nombres", {}, "has no Nombres"),
        (f"{__name__}.Numbers", {"length": 3}, r"the call with \(split, seed=, \*\*kwargs\) fails: .*length"),
        (f"{__name__}.no_records", {}, "returned a dict; expected a sequence of records"),
        (f"{__name__}.texts", {}, "got a str as the first record"),
    ],
)
def test_a_users_data_set_that_does_not_fit_is_refused(name: str, kwargs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load_records(DatasetConfig(dataset_name=name, kwargs=kwargs), seed=0)


# ---- contradicting keys ---------------------------------------------------------------------------------------------------


def test_all_problems_are_reported_at_once():
    recipe = a_recipe(
        "dpo",
        dataset_name="gsm8k",
        input_key="question",
        split_validation_size=1.5,
        validation=DatasetConfig(dataset_name="HelpSteer3", split_validation_size=0.1),
        data={"apply_chat_template": False},
    )
    assert named(check_data(recipe)) == {
        ("data.train.split_validation_size", "bad-format"),
        ("data.train.input_key", "has-no-effect"),
        ("data.train.dataset_name", "unsupported"),
        ("data.validation.dataset_name", "contradiction"),
        ("data.validation.split_validation_size", "has-no-effect"),
    }
    assert named(check_data(a_recipe("sft", dataset_name="Tulu3Preference"))) == {("data.train.dataset_name", "unsupported")}
