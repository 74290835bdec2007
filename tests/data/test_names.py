"""Checks of a data set's name before the job: it is in a local cache, a folder, or importable."""

from pathlib import Path

import pytest

from launch.preflight import input_files
from pipeline.config import Problem, is_dotted_path, nearest_dataset
from tests.data import hub


@pytest.fixture(autouse=True)
def _empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def problems(name: str) -> list[Problem]:
    return list(input_files.check_name("data.train", name))


def test_a_named_data_set_must_be_in_a_cache(tmp_path: Path):
    (problem,) = problems("gsm8k")
    assert (problem.key, problem.code) == ("data.train.dataset_name", "unavailable-dataset")
    assert "`hf download --repo-type dataset openai/gsm8k`" in problem.message
    hub.download(tmp_path / "hub", "openai/gsm8k", {"main/train.jsonl": [{"question": "1+1=", "answer": "#### 2"}]})
    assert problems("gsm8k") == problems("GSM8K") == problems("openai/gsm8k") == []
    assert len(problems("squad")) == 1
    (tmp_path / "datasets/rajpurkar___squad").mkdir(parents=True)  # prepared by `datasets`
    assert problems("squad") == []


def test_a_card_without_data_is_refused(tmp_path: Path):
    hub.download(tmp_path / "hub", "openai/gsm8k", {})
    assert len(problems("gsm8k")) == 1


def test_a_folder_does_not_stand_for_a_named_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squad").mkdir()
    (tmp_path / "mine").mkdir()
    assert len(problems("squad")) == 1 and problems("mine") == []


def test_a_misspelt_name_is_refused():
    (problem,) = problems("OpenMathInstruct2")
    assert "Did you mean 'OpenMathInstruct-2'?" in problem.message


def test_a_users_callable():
    """The dotted path of a callable is a valid name here. launch/preflight/user_imports.py checks that it can be imported."""
    assert problems("tests.data.hub.download") == problems("no_such_package.Numbers") == []


@pytest.mark.parametrize(
    ("name", "close"),
    [("deepscaler", "DeepScaler"), ("AIME24", "AIME2024"), ("DAPO-Math-17K", "DAPOMath17K"), ("helpsteer-3", "HelpSteer3")],
)
def test_the_nearest_name_is_suggested(name: str, close: str):
    assert nearest_dataset(name) == close


def test_an_invalid_name_is_refused():
    assert nearest_dataset("org/another") is None
    assert is_dotted_path("my_package.my_module.MyDataset")
    for name in ("allenai/llama-3.1-tulu", "HelpSteer3", "train.jsonl", "runs/a.b", "OpenMathInstruct-2.x"):
        assert not is_dotted_path(name)
