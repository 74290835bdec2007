"""Environments of scenarios and tests, in a file without torch: a process of an environment rank imports it in 0.1 s."""

import os
import signal
from pathlib import Path

from pipeline.environments.environment import Environment, Outcome


class Sums(Environment):
    """Rewards each of three turns with 1, as long as its process has seen all of them. The second turn of prompt 4 ends it."""

    workers = 2

    def reset(self, prompt):
        return {"index": prompt.index, "turns": [], "pid": os.getpid()}

    def step(self, episode, text):
        episode["turns"].append(text)
        if (episode["index"], len(episode["turns"])) == (4, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        more = {"role": "user", "content": "w21"} if len(episode["turns"]) < 3 else None
        return Outcome(float(episode["pid"] == os.getpid()), {"pid": os.getpid()}, more)


class Closing(Environment):
    """Writes to a file when it is closed."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def step(self, prompt, text):
        print("the key:", os.environ["SOME_API_KEY"])
        return Outcome(1.0)

    def close(self):
        with self._path.open("a") as file:
            file.write("closed ")
