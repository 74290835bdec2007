"""`python -m tests.benchmarks`, from the repository's root: the GRPO step against TRL 1.16, in one run.

    python -m tests.benchmarks                  the tables of both cases; `compare CASE` for one, 0.8M or 32M
    python -m tests.benchmarks profile CASE     where our step's time goes
    python -m tests.benchmarks tune CASE        CPU seconds by size of microbatch, TRL's and ours

All take one step in turns, one process each and one thread each, so whatever else runs on the machine meets all of them. What
is measured, and on equal terms, is in `cases.py`; CPU seconds are the figure to look at, since wall seconds include waiting for
a core. Left out: more than one rank and GPUs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.benchmarks import cases, floor, trl_environment
from tests.benchmarks.cases import CASES, Case
from tests.benchmarks.contender import ENVIRONMENT, Contender
from tests.benchmarks.report import CPU, Measured, print_case

FOLDER = Path(".bench")
BACKENDS = ("transformers", "vllm")
_PACKED_TOKENS = (512, 1024, 1536, 2048, 8192)  # tried by `tune`


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("command", nargs="?", choices=("compare", "profile", "tune"), default="compare")
    parser.add_argument("case", nargs="?", choices=CASES)
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="what samples in the profile")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # for the floor, which is measured in this process
    for case in [CASES[arguments.case]] if arguments.case else CASES.values():
        if arguments.command == "profile":
            command = [sys.executable, "-m", "tests.benchmarks.profile", case.name, str(_checkpoint(case)), arguments.backend]
            subprocess.run(command, env=os.environ | ENVIRONMENT, check=True)
        elif arguments.command == "tune":
            tune(case)
        else:
            compare(case)


def compare(case: Case) -> None:
    folder = _checkpoint(case)
    contenders = [_trl(case, folder, case.trl_micro_batch)]
    contenders += [_ours(case, folder, backend, case.packed_tokens) for backend in BACKENDS]
    measured = take_turns(case, contenders)
    print_case(case, floor.measure(case), measured)


def tune(case: Case) -> None:
    folder = _checkpoint(case)
    sizes = [size for size in range(case.generations, case.samples + 1) if case.samples % size == 0]
    trials = [(f"{size} samples", lambda size=size: _trl(case, folder, size)) for size in sizes]
    trials += [(f"{n} tokens", lambda n=n: _ours(case, folder, BACKENDS[0], n)) for n in _PACKED_TOKENS]
    for setting, start in trials:
        (measured,) = take_turns(case, [start()])
        print(f"{case.name}, {measured.name}, microbatches of {setting}: {measured.median(CPU):.3f} CPU s", flush=True)


def take_turns(case: Case, contenders: list[Contender]) -> list[Measured]:
    measured = [Measured(contender.name) for contender in contenders]
    for step in range(case.warmup + case.steps):
        for contender, record in zip(contenders, measured, strict=True):
            times, lengths = contender.step()
            if sorted(lengths) != sorted(case.lengths()):
                raise RuntimeError(f"{contender.name} sampled {sum(lengths)} tokens, not the {case.tokens[1]} dealt out")
            if step >= case.warmup:
                record.times.append(times)
    for contender in contenders:
        contender.close()
    return measured


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
