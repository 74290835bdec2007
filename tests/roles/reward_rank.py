"""Run one rank of a world in which two ranks serve a reward model.

Rank 0 has `conversations` scored and writes scores.json. The train and the generate rank do nothing else.
"""

import functools
import json
import os
from pathlib import Path

import numpy as np
import torch.distributed as dist

from pipeline import config
from pipeline.coordination.scoring import Scoring
from pipeline.data.chat import load_tokenizer
from pipeline.job.watchdog import Watchdog
from pipeline.job.world import RankInfo, WorkerGroups, World, join, leave, open_store, wait_for_all
from pipeline.roles.reward import RewardRole
from pipeline.rpc import RpcClient, RpcGroup, serve, stop
from pipeline.types import Completion, Prompt, Rollout, RolloutGroup, Turn, VersionSpan
from tests.roles.judges import END


def conversations() -> list[tuple[list[int], list[int]]]:
    """Return (prompt, completion) of many lengths."""
    draw = np.random.default_rng(3)
    return [
        (draw.integers(2, 40, n).tolist(), [*draw.integers(2, 40, m).tolist(), END])
        for n, m in zip(draw.integers(1, 9, 7), draw.integers(1, 20, 7), strict=True)
    ]


def group(index: int, asked: list[int], answered: list[int]) -> RolloutGroup:
    array = np.asarray(answered, np.int32)
    completion = Completion("0", array, np.zeros(len(array), np.float32), (VersionSpan(0, len(array)),), "stop")
    return RolloutGroup(Prompt(index, np.asarray(asked, np.int32), "judge", {}), (Rollout((Turn(completion),), 0.0),))


def score(recipe: config.Recipe, run_dir: Path, reward: RpcGroup[RewardRole]) -> None:
    places = reward.call(RewardRole.setup).result()
    scoring = Scoring(
        recipe, functools.partial(reward.scatter, RewardRole.score), places, load_tokenizer(recipe.policy.tokenizer)
    )
    judged = scoring([group(i, asked, answered) for i, (asked, answered) in enumerate(conversations())])
    found = {
        "places": [[place.rank, place.size] for place in places],
        "scores": [each.rollouts[0].reward for each in judged],
        "alone": [scoring([each])[0].rollouts[0].reward for each in judged[:2]],
    }
    (run_dir / "scores.json").write_text(json.dumps(found))


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
        assert dist.get_world_size() == (2 if world.component == "reward" else 1)
        if client:
            score(recipe, run_dir, RpcGroup(client, world, world.workers.reward, RewardRole, timeouts))
            stop(world)
        else:
            serve(world, RewardRole(recipe, 1, world) if world.component == "reward" else None)
    except Exception as error:
        watchdog.fail(error)
        raise
    watchdog.stop()
    leave(world, timeouts.silence)
    os._exit(0)
