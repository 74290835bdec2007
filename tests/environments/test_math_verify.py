"""Math verification with real workers: real math-verify, real processes, an expression that sympy does not finish."""

import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import EnvironmentConfig, answer_check
from pipeline.environments.environment import Outcome, Unjudged
from pipeline.environments.math import Math, _MathWorker
from pipeline.sandbox import processes
from pipeline.types import Prompt
from tests.environments.pooled import made, outcomes

NEVER_ENDS = "\\boxed{\\sum_{k=1}^{10^9} \\sin(k)^k}"


@pytest.fixture(scope="module")
def math() -> Iterator[Math]:
    with contextlib.closing(made("math", 30.0, 1)) as environment:
        yield environment


@pytest.fixture
def start() -> Iterator[Callable[..., Math]]:
    with contextlib.ExitStack() as stack:
        yield lambda timeout_s, workers=1: stack.enter_context(contextlib.closing(made("math", timeout_s, workers)))


def step(environment: Math, expected: str, text: str) -> tuple[float, dict[str, float]]:
    outcome = environment.step(Prompt(3, np.zeros(1, np.int32), "math", {"answer": expected}), text)
    return outcome.reward, outcome.metrics


@pytest.mark.parametrize(
    ("expected", "text", "right"),
    [
        ("42", "So the answer is 42.", True),
        ("42", "So the answer is 41.", False),
        ("42", "", False),
        ("42", 'quotes " and\nnew lines é, then \\boxed{42}', True),
        ("\\frac{1}{2}", "I get \\boxed{0.5}", True),
        ("\\frac{1}{2}", "$\\frac{2}{3}$", False),
        ("x^2+1", "\\boxed{1+x^2}", True),
        ("$x^2+1$", "\\boxed{x^2-1}", False),
        ("\\boxed{(1,2)}", "\\boxed{(1, 2)}", True),
        ("\\$18", "She pays \\boxed{18} dollars.", True),
        ("1,002", "The answer is 1002.", True),
    ],
)
def test_right_and_wrong(math: Math, expected: str, text: str, right: bool):
    assert step(math, expected, text) == (
        float(right),
        {"accuracy": float(right), "timeout": 0.0, "crash": 0.0, "unparsed": float(not text)},
    )


def test_the_answer_that_was_found_is_told(math: Math):
    prompt = Prompt(3, np.zeros(1, np.int32), "math", {"answer": "42"})
    texts = ["so \\boxed{42}", "so \\boxed{ 4 1 }", "it is 1/2", "I do not know", "\\boxed{" + "1+" * 2000 + "1}"]
    found = [math.step(prompt, text).extracted for text in texts]
    assert found[:4] == ["42", "41", "1/2", ""] and 100 < len(found[4]) <= 500


def test_an_expected_answer_without_content_excludes_the_episode(math: Math):
    with pytest.raises(Unjudged, match="prompt 3: math-verify cannot parse"):
        step(math, " ", "42")
    assert step(math, "5", "5")[0] == 1.0


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (r"$1 - \frac{1}{\mathrm{e}}$", r"\boxed{1}"),
        ("x**2 + 1", "So the answer is 1."),
        ("Eq(x**2/4 + y**2/3, 1)", r"\boxed{Eq(x**2/16 + y**2/12, 1)}"),
        (r"1 + 2\mathrm{i}", r"\boxed{3}"),
        (r"3\mathrm{e}^{2}", r"\boxed{3}"),
        (r"2 + \frac{1}{\operatorname{arcsec} 5}", r"\boxed{2+\frac{1}{\operatorname{arcsec} 7}}"),
        ("#### 7", "7"),
    ],
)
def test_a_part_of_the_expected_answer_is_wrong(math: Math, expected: str, text: str):
    assert step(math, expected, text)[0] == 0.0


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        *[
            ("42.", "42"),
            (r" \$1,234.50. ", "$1234.5"),
            ("42", "42"),
            ("1,234", "1234"),
            ("3/4", r"\boxed{0.75}"),
            ("$5", "It costs $5."),
            ("-0.5", r"$-\frac{1}{2}$"),
        ],
        *[(r"$1 - \frac{1}{\mathrm{e}}$", r"\boxed{\frac{e-1}{e}}"), (r"1 + 2\mathrm{i}", r"\boxed{2i+1}")],
        *[("The answer is $7$", "7"), ("$5 and $10", r"\boxed{5, 10}"), ("x**2 + 1", r"\boxed{x**2 + 1}")],
    ],
)
def test_plain_and_repeated_answers_are_right(math: Math, expected: str, text: str):
    assert step(math, expected, text)[0] == 1.0


ANSWERS = json.loads((Path(__file__).parent / "math_answers.json").read_text())
"""(expected answer, answer, whether it is right): the cases of math-verify's own tests."""
OTHERWISE = {
    ("1,22", "1.22"),
    ("$9$", "Answer $ \n 9 \n $"),
    ("$9$", "Answer \\( \n 9 \n \\)"),
    (r"$(\begin{pmatrix}\frac{1}{3}\\ \frac{1}{5} \end{pmatrix})$", r"$\begin{pmatrix}0.33\\0.2 \end{pmatrix}$"),
    (r"$(\frac{3}{5},\frac{8}{3}]$", "$(0.6,2.6667]$"),
    (r"$x \in [-2,7]$", r"$-2 \\le x \\le 7$"),
}
"""Those that NeMo-RL's settings of math-verify judge otherwise, as these do."""


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, 12))])
def test_public_answers_are_judged_right(math: Math, part: int):
    cases = ANSWERS[part::12]
    otherwise = {(gold, text) for gold, text, right in cases if step(math, gold, text)[0] != right}
    assert len(ANSWERS) == 242 and otherwise == OTHERWISE & {(gold, text) for gold, text, _ in cases}


def test_expected_answers_without_an_expression_are_refused():
    check = answer_check({"x": EnvironmentConfig(kind="math")}, "x").check
    for answer in [
        "42",
        "$1,234.50",
        "42.",
        r"\$ 1,234.5. ",
        "3/4",
        r"\frac{1}{2}",
        "$x^2$",
        "(1, 2]",
        r"$1 - \frac{1}{\mathrm{e}}$",
    ]:
        check(answer)
    for answer in ["", " ", "$", "x**2 + 1", "Eq(x**2/4 + y**2/3, 1)", "#### 7"]:
        with pytest.raises(ValueError, match="math-verify reads no expression"):
            check(answer)


def test_a_busy_machine_refuses_no_expected_answer(monkeypatch):
    monkeypatch.setattr(_MathWorker, "judge", lambda *_: {"timeout": True})
    answer_check({"x": EnvironmentConfig(kind="math")}, "x").check("x^2 + 1 \\text{ on a busy machine}")


@pytest.mark.parametrize(
    ("kind", "kwargs", "good", "bad"),
    [
        ("gsm8k", {}, ["5 + 7 = 12 #### 12", "$1,000"], ["", ",", "none"]),
        ("multiple_choice", {"choices": 4}, ["B", "(c)"], ["E", "", "2"]),
        ("exact_match", {}, ["yes"], ["", "\n"]),
        ("math", {"math_verify_impl": "dapo_math_verify"}, ["x**2 + 1", "34"], ["", "x=", "units"]),
        ("minerva_math", {}, ["34"], ["x**2 + 1"]),
        ("tools", {"judge": "y", "tools": {}}, ["B"], ["E"]),
    ],
)
def test_other_kinds_refuse_what_they_cannot_judge_by(kind: str, kwargs: dict, good: list[str], bad: list[str]):
    environments = {
        "x": EnvironmentConfig(kind=kind, kwargs=kwargs),
        "y": EnvironmentConfig(kind="multiple_choice", kwargs={"choices": 4}),
    }
    check = answer_check(environments, "x").check
    for answer in good:
        check(answer)
    for answer in bad:
        with pytest.raises(ValueError, match=r"got|math-verify"):
            check(answer)


TIMEOUT, CRASH = (
    {"accuracy": 0.0, "timeout": float(late), "crash": float(not late), "unparsed": 0.0} for late in (True, False)
)


def test_answers_that_never_end_do_not_affect_others(start):
    """Each of them blocks the only worker; the next answer does not wait for another worker to load."""
    environment = start(2.0)
    (worker,) = environment._processes
    prompt = Prompt(3, np.zeros(1, np.int32), "math", {"answer": "7"})
    wrong, right = (
        Outcome(0.0, TIMEOUT),
        Outcome(1.0, {"accuracy": 1.0, "timeout": 0.0, "crash": 0.0, "unparsed": 0.0}, extracted="7"),
    )
    assert outcomes(environment, 2.0, prompt, [NEVER_ENDS, "7"] * 2) == [wrong, right] * 2
    assert environment._processes == [worker] and len(processes.children(worker.process.pid)) <= 1
    environment.close()
    assert worker.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_an_answer_whose_judge_dies_is_wrong(math: Math, number: int):
    (worker,) = math._processes
    judged = threading.Event()
    killer = threading.Thread(target=_end_forks, args=(worker.process.pid, number, judged))
    killer.start()
    assert step(math, "1", NEVER_ENDS) == (0.0, CRASH)
    judged.set()
    killer.join()
    assert math._processes == [worker] and step(math, "7", "7")[0] == 1.0


def _end_forks(worker: int, number: int, judged: threading.Event) -> None:
    while not judged.wait(0.3):
        for fork in processes.children(worker):
            os.kill(fork, number)


def test_an_answer_that_breaks_its_fork_does_not_affect_later_ones(math: Math):
    (worker,) = math._processes
    assert step(math, "7", "7")[0] == 1.0
    for fork in processes.children(worker.process.pid):
        os.kill(fork, signal.SIGKILL)
    assert step(math, "7", "7") == (1.0, {"accuracy": 1.0, "timeout": 0.0, "crash": 0.0, "unparsed": 0.0})


HOSTILE = {
    "deep": "\\boxed{" + "\\frac{1}{" * 3000 + "2" + "}" * 3000 + "}",
    "parentheses": "\\boxed{" + "(" * 20_000 + "1" + ")" * 20_000 + "}",
    "digits": "\\boxed{" + "9" * 100_000 + "}",
    "tower": "\\boxed{9^{9^{9^{9^{9^{9}}}}}}",
    "factorial": "\\boxed{(10^9)!}",
    "half a surrogate pair": "\\boxed{\ud800}",
    "null": "\\boxed{\0}",
    "nothing": "\\boxed{" * 5000,
    "Python": "\\boxed{__import__('os')._exit(0)} $__import__('os')._exit(0)$ os._exit(0)",
}


@pytest.mark.full
@pytest.mark.parametrize("name", HOSTILE)
def test_no_expression_breaks_its_judge_or_the_next_one(name: str, start):
    environment = start(3.0)
    (worker,) = environment._processes
    reward, metrics = step(environment, "7", HOSTILE[name])
    assert reward == metrics["accuracy"] == 0.0
    assert step(environment, "7", "7")[0] == 1.0 and environment._processes == [worker]


def test_a_worker_has_no_secrets(monkeypatch: pytest.MonkeyPatch, start):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "SOME_VARIABLE"):
        monkeypatch.setenv(name, "canary")
    environment = start(30.0)
    assert b"canary" not in Path(f"/proc/{environment._processes[0].process.pid}/environ").read_bytes()


def test_a_lost_worker_is_replaced(start):
    """An answer cannot end a worker, since it is judged in a fork."""
    environment = start(60.0)
    worker = environment._processes[0].process
    killer = threading.Timer(0.5, worker.kill)
    killer.start()
    with pytest.raises(Unjudged, match="prompt 3: the math worker died"):
        step(environment, "1", NEVER_ENDS)
    assert step(environment, "7", "7")[0] == 1.0
    (second,) = environment._processes
    environment.close()
    assert second.process.returncode == -signal.SIGKILL


@pytest.mark.full
def test_threads_share_workers_of_which_one_hangs(start):
    environment = start(6.0, 2)
    hung = threading.Thread(target=lambda: hung_outcomes.append(step(environment, "1", NEVER_ENDS)))
    hung_outcomes: list[tuple[float, dict[str, float]]] = []
    hung.start()
    while environment._idle.qsize() > 1:
        time.sleep(0.01)
    with ThreadPoolExecutor(4) as threads:
        rewards = list(threads.map(lambda n: step(environment, str(n), "7")[0], range(20)))
    assert rewards == [float(n == 7) for n in range(20)]  # each thread has its own question's answer
    assert not hung_outcomes  # while the other worker is still busy
    hung.join()
    assert hung_outcomes == [(0.0, TIMEOUT)]
    environment.close()
    assert all(worker.process.poll() is not None for worker in environment._processes)


def test_any_other_error_of_a_step_affects_only_its_answer(monkeypatch: pytest.MonkeyPatch, start):
    """Twice: neither step waits for a lost worker."""
    environment = start(30.0)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.environments.math._MathWorker.judge", lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                step(environment, "7", "7")
    assert step(environment, "7", "7")[0] == 1.0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        environment._processes[0].process.kill()
        with pytest.raises(Unjudged, match="the math worker"):
            step(environment, "7", "7")
        with pytest.raises(Unjudged, match=r"did not start.*exit status 1"):
            step(environment, "7", "7")
    with contextlib.suppress(Unjudged):  # by a worker that was started before
        step(environment, "7", "7")
    assert step(environment, "7", "7")[0] == 1.0


def test_a_worker_gets_questions_only_when_it_is_ready(monkeypatch: pytest.MonkeyPatch, start):
    """Otherwise its imports would count as the answer's time. A step that cannot wait longer leaves it to the next one."""
    environment = start(30.0)
    ready, wait = threading.Event(), _MathWorker.wait_until_ready
    monkeypatch.setattr(_MathWorker, "wait_until_ready", lambda worker: ready.wait(60) and wait(worker))
    environment._processes[0].process.kill()
    with pytest.raises(Unjudged, match="the math worker"):
        step(environment, "7", "7")
    environment._timeout_s = 0.1
    with pytest.raises(Unjudged, match=r"no math worker was ready within 0\.025 s"):
        step(environment, "7", "7")
    environment._timeout_s = 30.0
    ready.set()
    assert step(environment, "7", "7")[0] == 1.0


def test_descriptors_beyond_the_limit_of_select(math: Math):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    (worker,) = math._processes
    pipe = worker.process.stdout
    try:
        worker.process.stdout = os.fdopen(fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 1500), "rb")
        assert step(math, "7", "7")[0] == 1.0
        worker.process.stdout.close()
    finally:
        worker.process.stdout = pipe
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_worker_imports_no_torch(math: Math):
    mapped = Path(f"/proc/{math._processes[0].process.pid}/maps").read_text()
    assert "libpython" in mapped or "python" in mapped
    assert "torch" not in mapped and "vllm" not in mapped


@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_worker_dies_with_its_parent(busy: bool):
    """Either while it waits for a question (its pipe ends) or during an answer (the kernel's signal)."""
    ask = f"worker.stdin.write(json.dumps({{'expected': '1', 'text': {NEVER_ENDS!r}}}).encode() + b'\\n');"
    program = (
        "import json, os, time; from tests.environments.pooled import made; worker = made('math')._processes[0].process;"
        f"{ask + 'worker.stdin.flush(); time.sleep(1);' if busy else ''}"
        "print(worker.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    worker = int(parent.stdout.readline())
    assert Path(f"/proc/{worker}").exists()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    for _ in range(200):
        if not _runs(worker):
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived its parent")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_worker_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"did not start.*exit status 1"):
        made("math", 10.0, 1)
