"""`python -m tests.benchmarks`, from the repository's root: GRPO, SFT and DPO against TRL 1.16, train backends, the refit.

    python -m tests.benchmarks                  all tables of the next five; a CASE after one of three is for that one alone
    python -m tests.benchmarks compare CASE     the GRPO step against TRL's: 0.8M, 32M
    python -m tests.benchmarks backends CASE    packed against padded, Megatron-Core against FSDP2: 0.8M-skewed, 32M-half
    python -m tests.benchmarks sft              SFT against TRL's: losses over 3 seeds, in one picture, and CPU seconds
    python -m tests.benchmarks dpo              DPO, so too
    python -m tests.benchmarks refit            planned against broadcast and bare gloo; against published figures
    python -m tests.benchmarks environments     what busy environments take from the engine, in threads and in judges
    python -m tests.benchmarks verbs            what a verb and a step's verbs cost rank 0 and its store, to 64 to 8,192 ranks
    python -m tests.benchmarks sandbox          starts and the Python tool's calls; --against FOLDER: another checkout's too

The first two take one step in turns, one process each and one thread each, so whatever else runs on the machine meets all of
them. What is measured, and on equal terms, is in `cases.py` and `lessons.py`; CPU seconds are the figure to look at, since wall
seconds include waiting for a core. Left out: GPUs, and steps of more than one rank.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import cases, floor, offline, sandbox, trl_environment
from tests.benchmarks.cases import CASES, STEP_CASES, TRAIN_CASES, Case
from tests.benchmarks.contender import ENVIRONMENT, Contender
from tests.benchmarks.lessons import LESSONS
from tests.benchmarks.report import MeasuredRun, print_backends, print_case
from tests.benchmarks.train_step import TRAIN_BACKENDS

FOLDER = Path(".bench")
BACKENDS = ("transformers", "vllm")  # that sample
LAYOUTS = ("packed", "padded")
AGREEMENT = 1e-4  # of losses and gradient norms, relative: on a CPU, torch's float32 norm of 2M numbers is off by up to 6e-5


COMMANDS = ("compare", "backends", *LESSONS, "refit", "environments", "verbs", "sandbox")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("command", nargs="?", choices=COMMANDS)
    parser.add_argument("case", nargs="?", choices=CASES)
    parser.add_argument("--against", type=Path, help="the root of another checkout, for the sandbox")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # for the floor, which is measured in this process
    chosen = (CASES[arguments.case],) if arguments.case else ()
    if arguments.command in (None, "compare"):
        for case in chosen or STEP_CASES:
            compare(case)
    if arguments.command in (None, "backends"):
        for case in chosen or TRAIN_CASES:
            compare_backends(case)
    if lessons := [name for name in LESSONS if arguments.command in (None, name)]:
        print(f"losses of {' and '.join(lessons)}: {offline.compare(lessons, FOLDER / 'offline', FOLDER / 'trl')}")
    if arguments.command in (None, "refit"):
        for name in ("transfer", "published"):
            subprocess.run([sys.executable, "-m", f"tests.benchmarks.refit_{name}"], env=os.environ | ENVIRONMENT, check=True)
    if arguments.command in (None, "environments"):
        subprocess.run([sys.executable, "-m", "tests.benchmarks.environments"], env=os.environ | ENVIRONMENT, check=True)
    if arguments.command == "verbs":
        subprocess.run([sys.executable, "-m", "tests.benchmarks.verbs"], check=True)
    if arguments.command == "sandbox":
        sandbox.main(arguments.against)


def compare(case: Case) -> None:
    folder = _checkpoint(case)
    contenders = [_trl(case, folder, case.trl_micro_batch)]
    contenders += [_ours(case, folder, backend, case.packed_tokens) for backend in BACKENDS]
    measured = take_turns(case, contenders, _check_lengths)
    print_case(case, floor.measure(case), measured)


def compare_backends(case: Case) -> None:
    folder = _checkpoint(case)
    contenders = [
        Contender(
            f"{title}, {layout}",
            [sys.executable, "-m", "tests.benchmarks.train_step", case.name, str(folder), backend, layout],
            FOLDER / f"{case.name}-{backend}-{layout}.log",
        )
        for backend, title in TRAIN_BACKENDS.items()
        for layout in LAYOUTS
    ]
    print_backends(case, *take_turns(case, contenders, _check_agreement))


Check = Callable[[Case, dict[str, dict[str, Any]]], None]
"""(case, every contender's answer of one turn, by name). Raises RuntimeError if they have not done equal work."""


def take_turns(case: Case, contenders: list[Contender], check: Check) -> list[MeasuredRun]:
    measured = [MeasuredRun(contender.name) for contender in contenders]
    for step in range(case.warmup + case.steps):
        answers = {contender.name: contender.step() for contender in contenders}
        check(case, answers)
        if step >= case.warmup:
            for record in measured:
                record.times.append(answers[record.name]["times"])
    for contender in contenders:
        contender.close()
    return measured


def _check_lengths(case: Case, answers: dict[str, dict[str, Any]]) -> None:
    for name, answer in answers.items():
        if sorted(answer["lengths"]) != sorted(case.lengths()):
            raise RuntimeError(f"{name} sampled {sum(answer['lengths'])} tokens, not the {case.tokens[1]} dealt out")


def _check_agreement(case: Case, answers: dict[str, dict[str, Any]]) -> None:
    (first, expected), *others = ((name, answer["metrics"]) for name, answer in answers.items())
    for name, metrics in others:
        for key, value in metrics.items():
            if not math.isclose(value, expected[key], rel_tol=AGREEMENT):
                raise RuntimeError(f"{case.name}: {name} has a {key} of {value}, but {first} of {expected[key]}")


def _trl(case: Case, folder: Path, micro_batch: int) -> Contender:
    command = [
        trl_environment.python(FOLDER / "trl"),
        "-m",
        "tests.benchmarks.trl_step",
        case.name,
        str(folder),
        str(micro_batch),
    ]
    return Contender("TRL 1.16", command, FOLDER / f"{case.name}-trl.log")


def _ours(case: Case, folder: Path, backend: str, packed_tokens: int) -> Contender:
    command = [sys.executable, "-m", "tests.benchmarks.our_step", case.name, str(folder), backend, str(packed_tokens)]
    return Contender(f"ours, sampling with {backend}", command, FOLDER / f"{case.name}-{backend}.log")


def _checkpoint(case: Case) -> Path:
    folder = FOLDER / "models" / case.name
    cases.write(case, folder)
    return folder


if __name__ == "__main__":
    main()
