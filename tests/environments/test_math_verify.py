"""Math verification with real judges: real math-verify, real processes, an expression that sympy does not finish."""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import EnvironmentConfig, answer_check
from pipeline.environments import math as math_environment
from pipeline.environments.environment import Unjudged
from pipeline.environments.math import Math
from pipeline.types import Prompt
from tests.environments.pooled import Pool, made
from tests.sandbox.hosts import until

NEVER_ENDS = "\\boxed{\\sum_{k=1}^{10^9} \\sin(k)^k}"


@pytest.fixture(scope="module")
def math() -> Iterator[Math]:
    with contextlib.closing(made("math", 30.0, 1)) as environment:
        yield environment


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Start one judge that has two seconds for an answer."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "WANDB_API_KEY", "SOME_VARIABLE"):
            patch.setenv(name, "canary")
        pool = Pool(tmp_path_factory.mktemp("tokenizer"), "math", 4.0, 1)
    yield pool
    pool.judges.close()


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
        with pytest.raises(ValueError, match="math-verify finds no expression"):
            check(answer)


def test_a_busy_machine_refuses_no_expected_answer(monkeypatch):
    class Busy:
        def is_expression(self, answer: str) -> bool:
            raise TimeoutError

        def kill(self) -> None:
            pass

    monkeypatch.setattr(math_environment, "_Reader", Busy)
    monkeypatch.setattr(math_environment, "_reader", None)
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


def wrong(**how: float) -> tuple[float, dict[str, float]]:
    return 0.0, {"accuracy": 0.0, "timeout": 0.0, "crash": 0.0, "unparsed": 0.0, **how}


RIGHT = 1.0, {"accuracy": 1.0, "timeout": 0.0, "crash": 0.0, "unparsed": 0.0}


def judged(pool: Pool, *texts: str) -> list[tuple[float, dict[str, float]]]:
    """Return what each answer to a question gets whose answer is 7."""
    return [(answer.reward, answer.metrics) for answer in pool.judge("7", *texts)]


def test_answers_that_never_end_do_not_affect_others(pool: Pool):
    assert judged(pool, NEVER_ENDS, "7", NEVER_ENDS, "7") == [wrong(timeout=1.0), RIGHT] * 2
    until(lambda: len(pool.pids) <= 1 or None)  # the judges that were ended are gone


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_an_answer_whose_judge_dies_is_wrong(pool: Pool, number: int):
    """Check an answer that breaks two judges: the second takes it, because an earlier answer may be the cause."""
    judged(pool, "7")
    ended = threading.Event()
    killer = threading.Thread(target=_end_judges, args=(pool, number, ended))
    killer.start()
    try:
        assert judged(pool, NEVER_ENDS) == [wrong(crash=1.0)]
    finally:
        ended.set()
        killer.join()
    assert judged(pool, "7") == [RIGHT]


def _end_judges(pool: Pool, number: int, ended: threading.Event) -> None:
    """Kill judges that have computed for a while; others have not seen the answer."""
    while not ended.wait(0.05):
        for pid in pool.pids:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]) > 15:  # hundredths of a second
                    os.kill(pid, number)


def test_a_judge_that_is_killed_between_two_answers_costs_none(pool: Pool):
    assert judged(pool, "7") == [RIGHT]
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    assert judged(pool, "7") == [RIGHT]


def test_a_judge_serves_many_answers_and_none_after_one_that_fails(pool: Pool):
    judged(pool, "7")
    (first,) = pool.pids
    assert judged(pool, "7", "6", "no number") == [RIGHT, wrong(), wrong(unparsed=1.0)] and pool.pids == [first]
    (failure,) = pool.judge(" ", "7")
    assert failure.why.startswith("step raised Unjudged: prompt 3: math-verify cannot parse") and not failure.of_answer
    assert judged(pool, "7") == [RIGHT] and first not in pool.pids


def test_a_judge_has_no_secrets_and_bounded_memory(pool: Pool):
    judged(pool, "7")
    (pid,) = pool.pids
    variables = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"canary" not in variables and b"PATH" not in variables
    assert b"canary" in Path(f"/proc/{pool.judges._process.pid}/environ").read_bytes()
    (limit,) = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "address space" in line]
    assert math_environment.MEMORY_BYTES < int(limit.split()[3]) < 4 * math_environment.MEMORY_BYTES


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
def test_no_expression_breaks_the_next_answer(name: str, pool: Pool):
    ((reward, metrics),) = judged(pool, HOSTILE[name])
    assert reward == metrics["accuracy"] == 0.0
    assert judged(pool, "7") == [RIGHT]


def test_a_reader_that_cannot_start_refuses_no_expected_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(math_environment, "_reader", None)
    assert math_environment.is_readable("x^2 + 1 \\text{ without a process}")
