"""Generate tasks of a terminal: make a file say something, in a folder where other files already say something.

    a=42      echo 42 >a
    b=a       cp a b                            a says 17
    b=a+1     cat a, which prints 17; echo 18 >b

The last kind takes two commands: the model must read a file before it can write the other. `tiny_terminal` learns them in a
shell; its agent (recipes/agents/terminal.py) makes the files, runs the commands and looks at the result.

Not supported: folders, other programs.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

from pipeline.recipe.problems import Problem, RecipeError

NAMES = "abcd"
VALIDATION_SHARE = 16  # one task in 16 is for validation
SLIPS = 0.25
"""Share of the wrong commands of `mistakes` that name another file; the others have a wrong digit."""


def tasks(split: str, size: int, seed: int, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Return `size` tasks, drawn with replacement, each with a demonstration.

        {"input": "b=a+1",
         "messages": [{"role": "user", "content": "b=a+1"}, {"role": "assistant", "content": "cat a"},
                      {"role": "user", "content": "17"}, {"role": "assistant", "content": "echo 18 >b"}],
         "files": {"a": "17"}, "answer": "b=18"}

    mistakes: the probability that a demonstration's last command is wrong; `answer` is always right. The task and its files
    alone decide whether it belongs to "train" or "validation". Raises RecipeError for another split.
    """
    if split not in ("train", "validation"):
        message = f"terminal_tasks: got split '{split}'; expected train or validation"
        raise RecipeError(Problem("data", "not-a-choice", message))
    draw, records = random.Random(f"terminal {split} {seed}"), []
    while len(records) < size:
        goal, source = draw.sample(NAMES, 2)
        says = str(draw.randrange(10, 100))
        kind = draw.choice(("say", "copy", "next"))
        said = str(int(says) + 1) if kind == "next" else says
        asked = {"say": f"{goal}={says}", "copy": f"{goal}={source}", "next": f"{goal}={source}+1"}[kind]
        files = {} if kind == "say" else {source: says}
        if (split == "validation") != (zlib.crc32(f"{asked} {files}".encode()) % VALIDATION_SHARE == 0):
            continue
        last = f"cp {source} {goal}" if kind == "copy" else f"echo {said} >{goal}"
        if draw.random() < mistakes:
            last = _wrong(last, said, goal, draw)
        messages = [{"role": "user", "content": asked}]
        if kind == "next":
            messages += [{"role": "assistant", "content": f"cat {source}"}, {"role": "user", "content": says}]
        messages.append({"role": "assistant", "content": last})
        records.append({"input": asked, "messages": messages, "files": files, "answer": f"{goal}={said}"})
    return records


def _wrong(command: str, said: str, goal: str, draw: random.Random) -> str:
    """Return a command that writes something else, or to another file."""
    other = draw.choice([name for name in NAMES if name != goal])
    if command.startswith("cp") or draw.random() < SLIPS:
        return command[: -len(goal)] + other
    return command.replace(said, str(draw.choice([number for number in range(10, 100) if str(number) != said])))
