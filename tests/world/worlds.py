"""A world of `tests.world.ranks`: seven processes of three realms."""

import json
import os
import time
from pathlib import Path

from tests.fork_server import Program
from tests.world import ranks
from tests.world.secret import write_secret

SIZE = 7


class World:
    def __init__(self, run_dir: Path, scenario: str, per_node: int = 1):
        """per_node: ranks per node; from two on each node but rank 0's has a relay."""
        self.run_dir = run_dir
        self.per_node = per_node
        run_dir.mkdir(exist_ok=True)
        write_secret(run_dir)
        self.logs = [run_dir / f"{rank}.log" for rank in range(SIZE)]
        self.processes = [self._start(rank, scenario) for rank in range(SIZE)]

    def _start(self, rank: int, scenario: str) -> Program:
        env = {
            "HETSTEP_RANK": str(rank),
            "HETSTEP_WORLD_SIZE": str(SIZE),
            "HETSTEP_LOCAL_RANK": str(rank),
            "HETSTEP_NODE": f"node{rank // self.per_node}",
            "RELAYED_FROM": "2" if self.per_node > 1 else "256",
            "HETSTEP_MASTER_ADDR": "127.0.0.1",
            "HETSTEP_ATTEMPT": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        return Program(ranks.main, (self.run_dir, scenario), {**os.environ, **env}, self.logs[rank])

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
