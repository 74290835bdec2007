"""Run one rank of a world in which two ranks serve a generative judge.

Rank 0 asks the judge over HTTP and writes replies.json. The train and the generate rank do nothing else.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from pipeline import config
from pipeline.job.watchdog import Watchdog
from pipeline.job.world import RankInfo, WorkerGroups, World, join, leave, open_store, wait_for_all
from pipeline.roles.served_judge import JudgeRole, served_judge
from pipeline.rpc import RpcClient, RpcGroup, serve, stop

QUESTIONS = [f"Is {i} odd?" + " Think." * i for i in range(8)]
SAMPLED = {"temperature": 1.5, "max_tokens": 8}


def ask(urls: list[str], text: str, timeout_s: float = 60.0, at: int = 0, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    reply = httpx.post(urls[at], json=body, timeout=timeout_s, trust_env=False)
    return {"status": reply.status_code, **reply.json()}


def replies(urls: list[str]) -> dict[str, Any]:
    """Return what the judge replies to all kinds of requests."""
    found: dict[str, Any] = {"engines": len(urls)}
    with ThreadPoolExecutor(8) as threads:
        found["greedy"] = list(threads.map(lambda text: ask(urls, text, max_tokens=8), QUESTIONS))
        found["sampled"] = list(threads.map(lambda text: ask(urls, text, **SAMPLED), QUESTIONS))
    found["alone"] = [ask(urls, text, at=-1, **SAMPLED) for text in QUESTIONS[:2]]
    found["another seed"] = [ask(urls, text, seed=1, **SAMPLED) for text in QUESTIONS]
    found["overlong"] = ask(urls, "word " * 200, max_tokens=100)
    found["stream"] = ask(urls, "?", stream=True)
    found["empty stop"] = ask(urls, "?", stop="")
    found["picture"] = ask(urls, [{"type": "image_url"}])  # type: ignore[arg-type]
    found["wrong key"] = ask([url.replace("/v1", "x/v1") for url in urls], "?")
    return found


def main(run_dir: Path) -> None:
    recipe = config.read(run_dir / "recipe.yaml")
    timeouts = recipe.cluster.timeouts
    info = RankInfo.from_environment(run_dir)
    world = World(info, WorkerGroups.of(recipe), open_store(info, timeouts.join))
    client = RpcClient(world) if world.rank == 0 else None
    watchdog = Watchdog(world, timeouts, *([client.overdue] if client else []))
    try:
        watchdog.start()
        wait_for_all(world, timeouts.join)
        join(world)
        if client:
            RpcGroup(client, world, world.workers.judge, JudgeRole, timeouts).call(JudgeRole.setup).result()
            served = served_judge(recipe, world)
            assert served
            (run_dir / "replies.json").write_text(json.dumps(replies(list(served.urls))))
            stop(world)
        else:
            serve(world, JudgeRole(recipe, 1, world) if world.component == "judge" else None)
    except Exception as error:
        watchdog.fail(error)
        raise
    watchdog.stop()
    leave(world, timeouts.silence)
    os._exit(0)
