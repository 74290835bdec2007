"""The tool `search`, on a small corpus, with the real package bm25s where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import index_corpus as command
from launch.preflight import installed
from pipeline import config
from pipeline.config import EnvironmentConfig
from pipeline.environments.build_environments import build
from pipeline.environments.tools import Tools
from pipeline.types import Prompt
from tests.environments.pooled import made
from tests.environments.test_tools import call, hermes, told
from tests.problems import named

HAS_PACKAGE = importlib.util.find_spec("bm25s") is not None
real = pytest.mark.skipif(not HAS_PACKAGE, reason="the package bm25s is not installed")
PASSAGES = [
    {"id": "0", "contents": '"Emma (novel)"\nEmma is a novel by Jane Austen, published in 1815.\nIt is about matchmaking.'},
    {"id": "1", "contents": '"Persuasion"\nPersuasion was the last novel that Austen completed.'},
    {"title": "Ålesund", "text": "Ålesund is a town in Norway, known for herring and Jugendstil."},
    {"text": "A passage without a title, about herring. " + "x" * 3000},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(passage, ensure_ascii="id" in passage) + "\n" for passage in PASSAGES))
    return path


@pytest.fixture(scope="module")
def index(corpus: Path) -> Path:
    folder = corpus.parent / "index"
    assert command.main([f"corpus={corpus}", f"index={folder}"]) == 0
    return folder


def environment(index: Path, **kwargs: Any) -> Tools:
    tools = {"search": {"kwargs": {"index": str(index), **kwargs}}}
    configs = {
        "tools": EnvironmentConfig(kind="tools", kwargs={"judge": "answers", "tools": tools}),
        "answers": EnvironmentConfig(kind="exact_match"),
    }
    return build(configs, call_parser=hermes())["tools"]


@real
def test_the_best_passages_come_first(index):
    tools = environment(index, results=2, passage=100)
    content, metrics = told(tools, call("search", query="Who wrote the novel Emma?"))
    assert metrics == {"accuracy": 0.0, "calls": 1.0, "call_errors": 0.0}
    assert content == (
        "Doc 1 (Title: Emma (novel)) Emma is a novel by Jane Austen, published in 1815.\nIt is about matchmaking.\n"
        "Doc 2 (Title: Persuasion) Persuasion was the last novel that Austen completed."
    )
    content, _ = told(tools, call("search", query="HERRING in Ålesund"))
    assert content.startswith("Doc 1 (Title: Ålesund) Ålesund is a town")
    assert content.splitlines()[1] == f"Doc 2 (Title: ) {PASSAGES[3]['text'][:100]}"


@real
@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({"query": "zebra"}, "nothing was found; try other words"),
        ({"query": "the of and"}, "nothing was found; try other words"),
        ({"query": "?! \\ \0"}, "nothing was found; try other words"),
        ({"query": " "}, "error: got a query of 0 characters; expected 1 to 1000"),
        ({"query": "novel " * 1000}, "error: got a query of 5999 characters; expected 1 to 1000"),
        ({"query": ["novel"]}, "error: argument query is a text"),
        ({"q": "novel"}, "error: the arguments are: query; not: q"),
    ],
)
def test_the_policy_reads_its_mistake(index, arguments, expected):
    content, metrics = told(environment(index), call("search", **arguments))
    assert content == expected
    assert metrics["call_errors"] == float(expected.startswith("error"))


@real
def test_threads_and_forks_share_an_index(index):
    tools = environment(index)
    with ThreadPoolExecutor(4) as threads:
        found = {content for content, _ in threads.map(lambda _: told(tools, call("search", query="herring")), range(40))}
    assert len(found) == 1
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, told(tools, call("search", query="herring"))[0].encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1 << 16).decode() in found


def problems(index: Path) -> set[tuple[str, str]]:
    kwargs = f"kwargs: {{judge: answers, tools: {{search: {{kwargs: {{index: {index}}}}}}}}}"
    keys = [f"env.addition={{_override_: true, kind: tools, {kwargs}}}", "env.answers.kind=exact_match"]
    recipe = config.load("tiny_grpo", keys)
    return named([*installed.problems(recipe), *installed.index_problems(recipe)])


KEY = "env.addition.kwargs.tools.search"
MISSING = set() if HAS_PACKAGE else {(KEY, "not-installed")}


def test_submission_refuses_a_missing_index(tmp_path):
    assert problems(tmp_path) == {(f"{KEY}.kwargs.index", "file-not-found")} | MISSING


@real
def test_submission_refuses_an_index_of_another_corpus(index, corpus):
    assert problems(index) == set()
    text = corpus.read_text()
    corpus.write_text(text + "{}\n")
    assert problems(index) == {(f"{KEY}.kwargs.index", "file-not-found")}
    corpus.write_text(text)


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"contents": "a"}\n{"document": "b"}\n', "line 2 of .*: it has: document; expected an object"),
        ('{"contents": "a"}\n[1]\n', "line 2"),
        ("", "is empty"),
    ],
)
@real
def test_a_bad_corpus_is_refused(tmp_path, capsys, text, expected):
    (tmp_path / "corpus.jsonl").write_text(text)
    assert command.main([f"corpus={tmp_path}/corpus.jsonl", f"index={tmp_path}/index"]) == 2
    printed = capsys.readouterr()
    assert re.search(expected, "".join(printed))
    assert not (tmp_path / "index/corpus.json").exists()


@pytest.mark.parametrize(
    "answer, reward",
    [
        ("<answer>Wilhelm Conrad Röntgen</answer>", 1.0),
        ("<answer>no</answer> I mean <answer> the  X-ray, </answer>", 1.0),
        ("<answer>X-ray</answer> I mean <answer>no</answer>", 0.0),
        ("an X-ray", 0.0),
        ("<answer>X ray</answer>", 0.0),
    ],
)
def test_the_reward_is_exact_match(answer, reward):
    task = {"text": "", "record": {"golden_answers": ["Wilhelm Conrad Röntgen", "An X-Ray"]}}
    prompt = Prompt(0, np.zeros(1, np.int32), "x", task)
    assert made(f"{config.RECIPES}/rewards/short_answers.py:exact_match").step(prompt, answer).reward == reward


@pytest.mark.skipif(HAS_PACKAGE, reason="the package bm25s is installed")
def test_the_command_names_the_package(corpus, capsys):
    assert command.main([f"corpus={corpus}", "index=out"]) == 2
    assert "pip install '.[bm25s]'" in "".join(capsys.readouterr())
