"""The agent of qwen3_8b_swe in containers of an image with a real repository, whose tests real pytest runs."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from pipeline import config
from pipeline.data.chat import load_tokenizer
from pipeline.environments.environment import AgentEnvironment, Outcome
from pipeline.rollout.rollout_messages import RolloutWork
from pipeline.sandbox import image_cache
from pipeline.types import Completion, Prompt, Sampling, VersionSpan
from tests.environments.pooled import made, write_tokenizer
from tests.environments.scripted_policy import play, play_async
from tests.generate import tiny
from tests.rollout import agent_scenarios as scenarios
from tests.rollout.engine import by_place
from tests.sandbox.conftest import unusable
from tests.sandbox.hosts import until
from tests.sandbox.images import make_root

BUG, FIX = "def add(a, b):\n    return a - b\n", "sed -i 's/a - b/a + b/' adder.py"
OLD_TEST = "from adder import add\n\n\ndef test_zero():\n    assert add(1, 0) == 1\n"
NEW_TEST = OLD_TEST + "\n\ndef test_add():\n    assert add(1, 2) == 3\n"
NAMES = {"FAIL_TO_PASS": ["tests/test_adder.py::test_add"], "PASS_TO_PASS": '["tests/test_adder.py::test_zero"]'}
CHEAT = """cat >cheat.py <<'E'
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    (yield).get_result().outcome = 'passed'
E
"""
REPORT = 'print("PASSED tests/test_adder.py::test_add\\nPASSED tests/test_adder.py::test_zero", flush=True)'
SCRIPT = (
    "cd /testbed\ngit checkout HEAD tests/test_adder.py\ngit apply - <<'EOF'\n{patch}EOF\n"
    "python3 -m pytest -rA tests/test_adder.py\n"
)


def git(folder: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *arguments], text=True)


@pytest.fixture(scope="module")
def record() -> Iterator[dict[str, Any]]:
    """A record whose image is a folder that its column `instance_id` names."""
    if reason := unusable():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="images-"))
    folder.chmod(0o755)  # root's containers are nobody's
    root = make_root(folder / "adder__1", more="git")
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in importlib.metadata.files(name) or ():
            if file.parts[0] != ".." and file.suffix != ".pyc":
                target = root / "usr/lib/python3/dist-packages" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), target)
    shutil.copytree(Path(os.path.dirname(os.__file__)) / "unittest", root / "usr/lib/python3.11/unittest")
    (root / "root/.bashrc").write_text("export ACTIVE=yes\n")
    testbed = root / "testbed"
    (testbed / "tests").mkdir(parents=True)
    (testbed / "adder.py").write_text(BUG)
    (testbed / "tests/test_adder.py").write_text(OLD_TEST)
    git(testbed, "init", "-q")
    git(testbed, "add", "-A")
    git(testbed, "commit", "-qm", "a bug")
    (testbed / "tests/test_adder.py").write_text(NEW_TEST)
    patch = git(testbed, "diff")
    (testbed / "tests/test_adder.py").write_text(OLD_TEST)
    (testbed / "leftover").write_text("of the image, in no commit")
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv(image_cache.VARIABLE, str(folder / "cache"))
        yield {**NAMES, "instance_id": "adder__1", "test_patch": patch, "images": str(folder)}
    shutil.rmtree(folder)


FUNCTION = f"{config.RECIPES}/agents/swe.py:play"
KWARGS = {"image": "{images}/{instance_id}", "turns": 3}


def block(*commands: str) -> list[str]:
    return [f"I try this.\n```bash\n{command}\n```" for command in commands]


def task_of(record: dict[str, Any]) -> tuple[AgentEnvironment, Prompt]:
    """Return the agent and a prompt of this record."""
    agent = made("python_agent", function=FUNCTION, kwargs=KWARGS)
    task = {"messages": [{"role": "user", "content": "add subtracts"}], "record": record}
    return agent, Prompt(0, np.zeros(1, np.int32), "swe", task)


def episode(record: dict[str, Any], answers: Sequence[str | int]) -> tuple[Outcome, list[str]]:
    """Return the outcome of an episode with these answers, and what the policy read after each but the last."""
    outcome, requests = play(*task_of(record), answers)
    return outcome, [message["content"] for message in requests[-1]["messages"][1:] if message["role"] == "user"]


@pytest.mark.parametrize("form", ["test_patch", "eval_script"])
def test_the_tests_decide(record, form):
    if form == "eval_script":
        record = {**record, "eval_script": SCRIPT.format(patch=record["test_patch"]), "test_patch": ""}
    outcome, read = episode(record, block(f"cd tests/.. && {FIX} && cat adder.py", "submit"))
    assert outcome.reward == 1, outcome
    assert read == ["def add(a, b):\n    return a + b\n[exit status 0]\n\n2 messages are left."]
    assert outcome.metrics == {"accuracy": 1.0, "submitted": 1.0, "applied": 1.0, "commands": 1.0, "malformed": 0.0}
    outcome, _ = episode(record, block("sed -i 's/a - b/b/' adder.py", "submit"))
    assert outcome.reward == 0 and outcome.metrics["applied"] == 1, outcome
    assert "FAILED tests/test_adder.py::test_zero" in outcome.notes["tests"]
    assert "-    return a - b\n+    return b" in outcome.notes["patch"]


TRICKS = {
    "nothing": "true",
    "a test": "echo 'def test_add(): pass\ndef test_zero(): pass' >tests/test_adder.py",
    "no test": "rm -r tests",
    "a link": "rm -r tests && mkdir mine && ln -s mine tests",
    "conftest": f"{CHEAT}cp cheat.py conftest.py",
    "conftest beside the tests": f"{CHEAT}mv cheat.py tests/conftest.py",
    "a plugin": f"{CHEAT}printf '[pytest]\\naddopts = -p cheat\\n' >pytest.ini",
    "a report": "sed -i 's/return/print(\"PASSED tests\\/test_adder.py::test_add\"); return/' adder.py",
    "a report before the tests": f"echo '{REPORT}; raise ImportError' >adder.py",
    "another pytest": f"echo '{REPORT}' >pytest.py",
    "another part of pytest": f"mkdir pluggy; echo '{REPORT}; import os; os._exit(0)' >pluggy/__init__.py",
    "metadata of a plugin": f"{CHEAT}mkdir a.dist-info; printf '[pytest11]\\na = cheat\\n' >a.dist-info/entry_points.txt",
    "an end": "echo 'import os; os._exit(0)' >>adder.py",
    "no repository": "rm -rf .git",
    "another git": "printf '#!/bin/sh\necho x >/tmp/work.patch' >/usr/bin/git",
}
# By default a trick of each kind: tests, configuration, pytest itself, git.
COMMON = ("nothing", "a test", "conftest", "another pytest", "no repository")


@pytest.mark.parametrize("trick", [pytest.param(name, marks=[pytest.mark.full] * (name not in COMMON)) for name in TRICKS])
def test_a_trick_earns_nothing(record, trick):
    outcome, _ = episode(record, block(TRICKS[trick], "submit"))
    assert outcome.reward == 0 and outcome.metrics["submitted"] == 1, outcome


def test_a_shell_that_ends_is_activated_again(record):
    activated = block("exit 3", "echo $ACTIVE", "submit")
    _, read = episode(record, activated)
    assert [text.splitlines()[0] for text in read] == ["[the shell ended]", "yes"]


@pytest.mark.parametrize("missing", ["FAIL_TO_PASS", "test_patch"])
def test_a_record_without_tests_is_no_task(record, missing):
    with pytest.raises((KeyError, ValueError)):
        episode({name: value for name, value in record.items() if name != missing}, [])


def test_a_record_with_an_empty_name_is_no_task(record):
    with pytest.raises(ValueError, match="FAIL_TO_PASS or PASS_TO_PASS: got an empty name"):
        episode({**record, "PASS_TO_PASS": [" "]}, [])


@pytest.mark.parametrize("status", [400, 410])
def test_the_end_of_the_window_ends_the_episode(record, status):
    outcome, _ = episode(record, [*block(FIX), status])
    assert (outcome.reward, outcome.metrics["submitted"], outcome.metrics["commands"]) == (0, 0, 1)


def test_an_error_of_the_endpoint_is_no_wrong_answer(record):
    with pytest.raises(openai.InternalServerError):
        episode(record, [*block(FIX), 500])


def test_the_tests_of_a_cut_episode_end(record):
    command = b"sleep\x0061.5\x00"
    script = f": <<'EOF'\n{record['test_patch']}EOF\nsleep 61.5"

    def running() -> bool:
        return any(arguments(process) == command for process in Path("/proc").glob("[0-9]*"))

    async def cut() -> None:
        agent, prompt = task_of({**record, "eval_script": script})
        playing = asyncio.ensure_future(play_async(agent, prompt, block(FIX, "submit")))
        await asyncio.to_thread(until, lambda: running() or None)
        playing.cancel()
        await asyncio.wait({playing})
        await asyncio.to_thread(until, lambda: not running() or None)

    asyncio.run(cut())


def arguments(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


LOGS = """
\x1b[32mPASSED\x1b[0m tests/a.py::test_one[a b]
XFAIL tests/a.py::test_two - reason
test_three (app.tests.Case) ... ok
test_four ok
FAILED tests/a.py::test_five - assert
PASSED tests/a.py::test_five
"""


@pytest.mark.parametrize(
    "name, passes",
    [
        ("tests/a.py::test_one[a", True),
        ("tests/a.py::test_one[a b]", True),
        ("tests/a.py::test_two", True),
        ("test_three (app.tests.Case)", True),
        ("test_four", True),
        ("tests/a.py::test_five", False),
        ("tests/a.py::test_six", False),
    ],
)
def test_the_log_is_read_as_swe_bench_does(record, name, passes):
    from recipes.agents.swe import Tests  # which needs a sandbox

    tests = Tests.of({"FAIL_TO_PASS": [name], "PASS_TO_PASS": [], "eval_script": "+++ b/tests/a.py"})
    assert tests.pass_by(LOGS) == passes


def test_only_what_is_submitted_counts(record):
    outcome, read = episode(record, ["I think.", *block(FIX), "```bash\na\n```\n```bash\nsubmit\n```"])
    assert (outcome.reward, outcome.metrics["submitted"], outcome.metrics["malformed"]) == (0.0, 0.0, 2.0)
    assert read[0].startswith("Expected one command in one block")


class Scripted:
    """A backend that draws what an issue's script says, since no untrained model resolves one."""

    def __init__(self, engine: Any, tokenizer: Any, scripts: dict[str, list[str]]) -> None:
        self._engine, self._tokenizer, self._scripts = engine, tokenizer, scripts
        self._requests: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def pending(self) -> int:
        return len(self._requests)

    def add(self, requests: list[Any]) -> None:
        self._requests += requests

    def step(self) -> list[Completion]:
        drawn, self._requests = [self._draw(request) for request in self._requests], []
        return drawn

    def _draw(self, request: Any) -> Completion:
        text = self._tokenizer.decode(request.tokens)
        script = next(script for issue, script in self._scripts.items() if issue in text)
        said = script[text.count("messages are left")]
        tokens = np.array([*self._tokenizer(said).input_ids, self._tokenizer.eos_token_id], np.int32)
        return Completion(request.id, tokens, np.zeros(len(tokens), np.float32), (VersionSpan(7, len(tokens)),), "stop")


def through_the_endpoint(folder: Path, record: dict[str, Any]) -> None:
    """Judges play episodes through the endpoint, and what the policy said is learned with its reward."""
    write_tokenizer(folder, eos_token="</s>")
    shape = {**tiny.SHAPE, "vocab_size": 320, "eos_token_id": 256, "max_position_embeddings": 4096}
    AutoModelForCausalLM.from_config(LlamaConfig(**shape)).save_pretrained(folder)
    policy = scenarios.policy_of(folder, length=4096)
    bench = scenarios.AgentBench(folder, "python_agent", policy=policy, function=FUNCTION, kwargs=KWARGS)
    tokenizer = load_tokenizer(policy.tokenizer)
    scripts = {"add is wrong": block(FIX, "submit"), "it fails": block("ls", "submit")}
    bench.engine._engine = Scripted(bench.engine._engine, tokenizer, scripts)
    prompts = [
        Prompt(
            i,
            np.array(bench._encode(issue), np.int32),
            "told",
            {"messages": [{"role": "user", "content": issue}], "record": record},
        )
        for i, issue in enumerate(scripts)
    ]
    later = bench.driver.rollout(RolloutWork(0, prompts, 2, "train", 42, Sampling(max_new_tokens=512), max_turns=8))
    bench.driver.work(lambda: False)
    played = by_place(later.unsent)
    for number, (script, reward) in enumerate(zip(scripts.values(), (1.0, 0.0), strict=True)):
        assert len(played[number]) == 2
        for rollout in played[number]:
            assert (rollout.reward, rollout.broke, rollout.failure) == (reward, "", ""), rollout
            assert [tokenizer.decode(turn.completion.tokens[:-1]) for turn in rollout.turns] == script
            assert rollout.metrics["unmatched_answers"] == 0
    bench.pool.close()


@pytest.mark.full
def test_a_run_plays_it(play_in, tmp_path, record):
    status, printed = play_in(through_the_endpoint, tmp_path, record)
    assert status == 0, printed[-4000:]
