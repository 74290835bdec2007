"""`python -m tests.benchmarks evaluation`: CPU seconds per 1,000 greedy answers, against lm-evaluation-harness's models.

Ours is a whole evaluation with one engine: reading and encoding the data, the engine, the environment's process, the store, and
the answers on disk. Of lm-evaluation-harness it is the call of its model alone, without its tasks. All give the same texts.
Needs lm_eval 0.4.13 and its requirements, for example in a folder on PYTHONPATH:
`pip install --target .bench/lm_eval --no-deps lm_eval==0.4.13 ...`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.benchmarks.cases import EOS, PAD, Case, write
from tests.benchmarks.contender import Contender

FOLDER = Path(".bench/evaluation")
CASE = Case("0.8M-evaluation", 48, 128, 344, 4, 4, 1, 1, 128, 256, 256, 0, 0, packed_tokens=0, trl_micro_batch=0)
TURNS, QUESTIONS = 4, 256  # the first turn is for warming up
LONGEST, ANSWER = 128, 256  # most tokens of a prompt, and of an answer
GAIN = 8.0  # of the weights
WEIGHTS = "model.safetensors"
TOGETHER = 64  # answers that an engine draws, or rows of a batch
THEIRS = ("hf", "vllm")
OURS = "Hetstep, vLLM"


def prompts(turn: int) -> list[str]:
    """Return the prompts of a turn, of 16 to LONGEST words, each of which is a token."""
    draw = random.Random(turn)
    return [" ".join(f"w{draw.randrange(2, 48)}" for _ in range(draw.randint(16, LONGEST))) for _ in range(QUESTIONS)]


def cpu_s() -> float:
    """Return the CPU seconds of this process and of all below it that live."""
    parents: dict[int, tuple[int, int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)] = (int(fields[1]), int(fields[11]) + int(fields[12]))
    return sum(ticks for pid, (_, ticks) in parents.items() if os.getpid() in _line(pid, parents)) / os.sysconf("SC_CLK_TCK")


def _line(pid: int, parents: dict[int, tuple[int, int]]) -> Iterator[int]:
    """Yield a process and those above it."""
    while pid in parents:
        yield pid
        pid = parents[pid][0]


def compare(turns: int = TURNS) -> None:
    """Print the table."""
    model = FOLDER / "model"
    _write_model(model)
    commands = {OURS: ["our_evaluation", str(model), str(turns)]}
    commands |= {f"lm_eval, {name}": ["lm_eval_model", str(model), name] for name in THEIRS}
    contenders = []
    for name, (module, *arguments) in commands.items():
        command = [sys.executable, "-m", f"tests.benchmarks.{module}", *arguments]
        contenders.append(Contender(name, command, FOLDER / f"{name.replace(', ', '-')}.log"))
    spent: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    equal = dict.fromkeys(spent, 0)
    for turn in range(turns):
        answers = {contender.name: contender.step() for contender in contenders}
        for name, answer in answers.items():
            if turn:
                spent[name].append(answer["cpu_s"] / QUESTIONS * 1000)
                equal[name] += sum(map(_same, answer["texts"], answers[OURS]["texts"]))
    for contender in contenders:
        contender.close()
    _print(spent, equal, turns)


def _same(text: str, other: str) -> bool:
    """Return whether two answers have the same words. lm_eval's vllm model keeps special tokens in its texts."""
    return text.replace("<pad>", " ").split() == other.replace("<pad>", " ").split()


def _write_model(folder: Path) -> None:
    """Write a random model whose answers end at geometric lengths: large weights make each token hard to foretell."""
    write(CASE, folder)
    weights = {name: value if value.dim() == 1 else GAIN * value for name, value in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    for name in ("config.json", "generation_config.json"):  # transformers reads the end of sequence there
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": EOS, "pad_token_id": PAD}))


def _print(spent: dict[str, list[float]], equal: dict[str, int], turns: int) -> None:
    ours = statistics.median(spent[OURS])
    size = f"{CASE.parameters / 1e6:.1f}M parameters, float32"
    print(f"{size}; prompts of 16 to {LONGEST} tokens, greedy answers of at most {ANSWER}, 69 on average.")
    print(f"{TOGETHER} at a time. {turns - 1} turns of {QUESTIONS} answers, after one for warming up. CPU seconds per 1,000:")
    print(f"{'':24s} {'median':>8s} {'min':>8s} {'max':>8s} {'of ours':>8s} {'same texts':>11s}")
    for name, seconds in spent.items():
        median, same = statistics.median(seconds), f"{equal[name]}/{(turns - 1) * QUESTIONS}"
        print(f"{name:24s} {median:8.2f} {min(seconds):8.2f} {max(seconds):8.2f} {median / ours:7.2f}x {same:>11s}")


def records(turn: int) -> list[dict[str, Any]]:
    """Return the prompts of a turn as records of a data set."""
    return [{"prompt": prompt, "answer": "w2"} for prompt in prompts(turn)]


def write_records(folder: Path, turns: int) -> list[Path]:
    """Write each turn's records as a JSONL file."""
    paths = [folder / f"turn{turn}.jsonl" for turn in range(turns)]
    for turn, path in enumerate(paths):
        path.write_text("".join(json.dumps(record) + "\n" for record in records(turn)))
    return paths


if __name__ == "__main__":
    compare(int(sys.argv[1]) if len(sys.argv) > 1 else TURNS)
