"""A world of `tests.world.ranks`: seven processes of three realms."""

import json
import os
import sys
import time
from pathlib import Path

from tests import fork_server
from tests.world import ranks
from tests.world.secret import write_secret

ROOT = Path(__file__).parents[2]
SIZE = 7


class RankProcess:
    """A rank as a process, with those methods of `subprocess.Popen` that tests use. It is a fork of the tests' fork server."""

    def __init__(self, env: dict[str, str], log: Path, run_dir: Path, scenario: str):
        self._process = fork_server.context().Process(target=_run, args=(env, log, run_dir, scenario))
        self._process.start()
        self.pid = self._process.pid
        self.kill = self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"process {self.pid} has not ended within {timeout} s"
        return self._process.exitcode


def _run(env: dict[str, str], log: Path, run_dir: Path, scenario: str) -> None:
    os.environ.update(env)
    os.chdir(ROOT)
    with open(log, "w") as out:
        for number in (1, 2):
            os.dup2(out.fileno(), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    ranks.main(run_dir, scenario)


class World:
    def __init__(self, run_dir: Path, scenario: str):
        self.run_dir = run_dir
        run_dir.mkdir(exist_ok=True)
        write_secret(run_dir)
        self.logs = [run_dir / f"{rank}.log" for rank in range(SIZE)]
        self.processes = [self._start(rank, scenario) for rank in range(SIZE)]

    def _start(self, rank: int, scenario: str) -> RankProcess:
        env = {
            "HETSTEP_RANK": str(rank),
            "HETSTEP_WORLD_SIZE": str(SIZE),
            "HETSTEP_LOCAL_RANK": str(rank),
            "HETSTEP_NODE": f"node{rank}",
            "HETSTEP_MASTER_ADDR": "127.0.0.1",
            "HETSTEP_ATTEMPT": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        return RankProcess(env, self.logs[rank], self.run_dir, scenario)

    def wait(self, timeout: float = 150) -> list[int]:
        deadline = time.monotonic() + timeout
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def until(self, text: str, rank: int = 0) -> None:
        deadline = time.monotonic() + 150
        while text not in self.log(rank):
            assert time.monotonic() < deadline, self.log(rank)
            time.sleep(0.05)

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text()

    def failure(self) -> dict:
        return json.loads(next(self.run_dir.glob("attempts/*/failure.json")).read_text())

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
