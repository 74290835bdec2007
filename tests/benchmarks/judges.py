"""Compare the judges of two checkouts: what hostile answers cost, answers judged a second, and rewards.

    python -m tests.benchmarks.judges [CHECKOUT ...] [hostile] [speed] [rewards]

CHECKOUT is a checkout's root folder; this one is always measured too. `hostile` prints, for each way in which an answer can
break its judge, what its episode gets, what 16 right answers beside it get, and how long all of them take. `speed` prints
answers a second that one engine's eight judges give, for math and for a function that returns at once, and the memory of its
processes. `rewards` prints a digest of the verdicts on 1,000 answers to math problems.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from pipeline.config import EnvironmentConfig, TokenizerConfig
from pipeline.environments.environment import Environment, Outcome
from pipeline.rollout.judges.environment_steps import CallFailure, EnvironmentSettings, StepRequest
from pipeline.rollout.judges.pool import JudgePool
from pipeline.sandbox import processes
from pipeline.types import Prompt

ROOT = Path(__file__).parents[2]
MODULE = "tests.benchmarks.judges"  # __name__ is "__main__"
LIMIT_S = 2.0
JUDGES = 8


# ---- judges that an answer breaks ------------------------------------------------------------------------------------------


def _leave_a_child() -> float:
    if os.fork() == 0:
        os.setsid()
        time.sleep(30)
        os._exit(0)
    os._exit(3)


def _fill_memory() -> float:
    kept = []
    for _ in range(64):
        kept.append(np.ones(1 << 24))
        if sum(array.nbytes for array in kept) >= 1 << 30:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does
    return 0.0


WAYS = {
    "raises": lambda: {}["answer"],
    "sys.exit": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(0),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "hangs": lambda: threading.Event().wait(),
    "holds the GIL": lambda: __import__("re").fullmatch("(a+)+", "a" * 64 + "b"),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "fills memory": _fill_memory,
    "leaves a child": _leave_a_child,
    "forks": lambda: Outcome(float(os.fork() == 0)),
    "floods": lambda: Outcome(1.0, {f"metric {n}": 1.0 for n in range(1 << 20)}),
}


class Hostile(Environment):
    """Break the judge in the way that the answer names."""

    workers = 4

    def step(self, prompt, text):
        if text in WAYS:
            return WAYS[text]()
        time.sleep(0.05)
        return Outcome(float(text == "right"))


def at_once(prompt: str, answer: str, expected: str) -> float:
    """Return a reward in microseconds."""
    return float(answer == expected)


# ---- measurements ----------------------------------------------------------------------------------------------------------


class Judged:
    """The environment `it` of one engine."""

    def __init__(self, folder: Path, kind: str, limit_s: float, workers: int | None = None) -> None:
        from tests.rollout.hostile_policy import write_tokenizer

        write_tokenizer(folder)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        environment = EnvironmentConfig(kind=kind, timeout_s=limit_s, workers=workers, precision="float32")
        settings = EnvironmentSettings({"it": environment}, TokenizerConfig(name=str(folder)), False, 1, sys.path, grace_s=0.5)
        self.wakeup = threading.Event()
        self.executor = JudgePool(settings, self.wakeup)
        self.executor.wait_until_loaded()

    def judge(self, asked: list[tuple[str, str]], first: int = 0) -> list[Any]:
        """Return the outcome of each (expected answer, answer), all submitted at once."""
        for number, (expected, text) in enumerate(asked):
            tokens = np.asarray(self.tokenizer(text).input_ids, np.int32)
            prompt = Prompt(number, np.asarray([1], np.int32), "it", {"answer": expected, "text": ""})
            self.executor.submit(StepRequest(str(first + number), f"answer {number}", "it", prompt, tokens, True, 10))
        found: dict[str, Any] = {}
        while len(found) < len(asked):
            self.wakeup.wait(self.executor.seconds_left())
            self.wakeup.clear()
            found |= self.executor.take()
        return [found[str(first + number)] for number in range(len(asked))]


def told(answer: Any) -> str:
    if isinstance(answer, CallFailure):
        return f"{'wrong' if answer.of_answer else 'LEFT OUT'}: {answer.why[:70]}"
    return f"judged {answer.reward:g}" + (f", {len(answer.metrics)} metrics" if len(answer.metrics) > 9 else "")


def hostile(folder: Path) -> None:
    print(f"| the answer | its episode | 16 right answers beside it | seconds (limit {LIMIT_S:g} + 0.5) |")
    print("|---|---|---|---|")
    judges = Judged(folder, f"{MODULE}.Hostile", LIMIT_S)
    for number, way in enumerate(WAYS):
        begun = time.monotonic()
        asked = [("right", "right")] * 4 + [("right", way)] + [("right", "right")] * 12
        answers = judges.judge(asked, 100 * number)
        taken = time.monotonic() - begun
        rights = Counter(told(answer) for place, answer in enumerate(answers) if place != 4)
        others = "; ".join(f"{count} {what}" for what, count in rights.items())
        print(f"| {way} | {told(answers[4])} | {others} | {taken:.1f} |", flush=True)
    judges.executor.close()
    print(f"processes left: {len(processes.descendants(os.getpid()))}")


def math_answers(count: int) -> list[tuple[str, str]]:
    """Return expected answers and answers: those of math-verify's tests, and sums of fractions."""
    known = json.loads((ROOT / "tests/environments/math_answers.json").read_text())
    draw = random.Random(3)
    found = [(gold, text) for gold, text, _ in known]
    while len(found) < count:
        a, b, c, d = (draw.randrange(1, 30) for _ in range(4))
        gold = f"\\frac{{{a}}}{{{b}}} + \\frac{{{c}}}{{{d}}}"
        right = draw.choice([f"{(a * d + b * c) / (b * d)!r}", f"\\frac{{{a * d + b * c}}}{{{b * d}}}", f"x^{a}", f"{a}"])
        found.append((gold, f"So it is \\boxed{{{right}}}."))
    return found[:count]


def memory(pid: int) -> float:
    """Return the MB of a process that no other process shares; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Private_Clean"))) / 1e3


def speed(folder: Path) -> None:
    for kind, count in (("math", 1500), (f"{MODULE}.at_once", 6000)):
        judges = Judged(folder, kind, 30.0, JUDGES)
        asked = math_answers(count) if kind == "math" else [("4", "4")] * count
        judges.judge(asked[:200])
        rates = []
        for number in range(1, 4):
            begun = time.monotonic()
            judges.judge(asked, number * 10_000)
            rates.append(count / (time.monotonic() - begun))
        private = [memory(pid) for pid in processes.descendants(os.getpid())]
        print(
            f"{kind}: {sorted(rates)[1]:.0f} answers a second; {len(private)} processes, {sum(private):.0f} MB of their own:"
            f" {', '.join(f'{one:.0f}' for one in sorted(private))}",
            flush=True,
        )
        judges.executor.close()


def rewards(folder: Path) -> None:
    judges = Judged(folder, "math", 30.0, JUDGES)
    answers = judges.judge(math_answers(1000))
    judges.executor.close()
    digest, counts = hashlib.sha256(), Counter[str]()
    for answer in answers:
        if isinstance(answer, CallFailure):
            digest.update(answer.why.encode())
            counts["failed"] += 1
            continue
        digest.update(struct.pack("<d", answer.reward) + json.dumps([answer.metrics, answer.extracted]).encode())
        counts.update([f"reward {answer.reward:g}", *(name for name, value in answer.metrics.items() if value)])
    print(f"1,000 answers: {dict(counts)}, digest {digest.hexdigest()[:16]}", flush=True)


def main(given: list[str]) -> None:
    parts = [name for name in ("hostile", "speed", "rewards") if name in given] or ["hostile", "speed", "rewards"]
    checkouts = [Path(name).absolute() for name in given if name not in ("hostile", "speed", "rewards")]
    for part in parts:
        for root in (*checkouts, ROOT):
            print(f"\n{part}, {root}", flush=True)
            variables = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tests.benchmarks.judges", "--here", part]
            subprocess.run(command, cwd=root, env=variables, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        with tempfile.TemporaryDirectory() as made:
            {"hostile": hostile, "speed": speed, "rewards": rewards}[sys.argv[2]](Path(made))
    else:
        main(sys.argv[1:])
