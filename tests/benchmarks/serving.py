"""Poll the service from many clients: python -m tests.benchmarks.serving [clients=200] [runs=1000] [seconds=10].

Prints the requests per second and the quantiles of their seconds, of `GET /runs/{id}` with the state of a random run.
"""

import asyncio
import multiprocessing
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import uvicorn

from launch.serving.app import application
from tests.launch import made_runs
from tests.launch.serving.team import bearer, settings


async def poll(client: httpx.AsyncClient, ids: list[str], until: float, took: list[float], wrong: list[int]) -> None:
    while time.monotonic() < until:
        begun = time.monotonic()
        answer = await client.get(f"/api/v1/runs/{random.choice(ids)}")
        took.append(time.monotonic() - begun)
        if answer.status_code != 200:
            wrong.append(answer.status_code)


async def clients(address: str, count: int, seconds: float, queue) -> None:
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
    took, wrong = [], []
    async with httpx.AsyncClient(base_url=address, headers=bearer("vera"), limits=limits, timeout=120) as client:
        begun = time.monotonic()
        listed = (await client.get("/api/v1/runs", params={"limit": 1000})).json()
        ids = [run["id"] for run in listed["runs"]]
        for run_id in ids:
            await client.get(f"/api/v1/runs/{run_id}")
        first = time.monotonic() - begun
        until = time.monotonic() + seconds
        await asyncio.gather(*(poll(client, ids, until, took, wrong) for _ in range(count)))
    queue.put((first, took, wrong))


def start(*given) -> None:
    asyncio.run(clients(*given))


def main(arguments: list[str]) -> None:
    given = {"clients": 200, "runs": 1000, "seconds": 10} | {
        key: int(value) for key, value in (a.split("=") for a in arguments)
    }
    with tempfile.TemporaryDirectory() as root:
        first_run = made_runs.folder(Path(root) / "sam/run0")
        made_runs.steps(first_run, 1, 20, made_runs.Texts("a", "b", "c", "d"))
        for i in range(1, given["runs"]):
            shutil.copytree(first_run, Path(root) / f"sam/run{i}")
        app = application(settings(Path(root), cache_s=5.0))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        threading.Thread(target=server.run, daemon=True).start()
        while not server.started:
            time.sleep(0.01)
        address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        queue = multiprocessing.get_context("spawn").Queue()
        arguments = (address, given["clients"], given["seconds"], queue)
        polling = multiprocessing.get_context("spawn").Process(target=start, args=arguments)
        polling.start()
        first, took, wrong = queue.get(timeout=600)
        polling.join()
        server.should_exit = True
    took.sort()
    at = {share: took[int(share * (len(took) - 1))] for share in (0.5, 0.99, 1.0)}
    rate = len(took) / given["seconds"]
    print(f"{given['clients']} clients, {given['runs']} runs: read once in {first:.1f} s, then {rate:.0f} requests/s")
    print(f"seconds: median {at[0.5]:.3f}, 99% {at[0.99]:.3f}, longest {at[1.0]:.3f}; other answers than 200: {len(wrong)}")


if __name__ == "__main__":
    main(sys.argv[1:])
