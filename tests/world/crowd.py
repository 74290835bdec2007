"""Open connections to an address and send nothing: `python -m tests.world.crowd HOST PORT COUNT [again]`.

Prints a line when all COUNT connections are open, and holds them until its input ends. With `again`, a closed connection is
opened anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline.sandbox import linux

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def crowd(address: tuple[str, int], count: int, again: bool = False) -> Iterator[None]:
    """Hold `count` connections open from another process."""
    command = [
        sys.executable,
        "-m",
        "tests.world.crowd",
        address[0],
        str(address[1]),
        str(count),
        *(["again"] if again else []),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "here\n"
            yield
        finally:
            process.kill()


class Stranger(asyncio.Protocol):
    def __init__(self) -> None:
        self.gone = asyncio.get_running_loop().create_future()

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set_result(None)


async def _main(host: str, port: int, count: int, again: bool) -> None:
    loop = asyncio.get_running_loop()
    here, all_here = [0], asyncio.Event()

    async def one() -> None:
        while True:
            try:
                _, stranger = await loop.create_connection(Stranger, host, port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            here[0] += 1
            if here[0] == count:
                all_here.set()
            await stranger.gone
            if not again:
                return

    strangers = [asyncio.ensure_future(one()) for _ in range(count)]
    await all_here.wait()
    print("here", flush=True)
    await asyncio.wait(strangers)
    await asyncio.Event().wait()


if __name__ == "__main__":
    linux.raise_open_files()
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["again"]))
