"""An engine of two ranks in a world of three, each a process; the third takes no part."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.types import LikelihoodRequest
from tests.fork_server import Program
from tests.generate.in_flight import CASES, drive
from tests.generate.tiny import Checkpoint, drain, policy, refit, requests

BYSTANDER, ENGINE = 0, (1, 2)
STOP = (" w5", "8 w")  # stop strings that about half of the completions have


def run(folder: Path, old: Checkpoint, new: Checkpoint, settings: dict) -> list[dict]:
    """Return what each rank of the engine replies."""
    ranks = []
    for rank in range(3):
        files = [str(folder / "rendezvous"), str(old.folder), str(new.folder), str(folder / f"{rank}.json")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks.append(Program(main, (rank, *files, json.dumps(settings)), environment, folder / f"{rank}.log"))
    try:
        statuses = [rank.wait(timeout=240) for rank in ranks]
        assert statuses == [0, 0, 0], [(folder / f"{rank}.log").read_text()[-3000:] for rank in range(3)]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in ENGINE]


def main(rank: int, rendezvous: str, old: str, new: str, output: str, settings: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    world = dist.group.WORLD
    groups = [dist.new_group([BYSTANDER]), dist.new_group(ENGINE)]
    dist.group.WORLD = groups[rank in ENGINE]
    if rank in ENGINE:
        from pipeline.generate import build

        os.environ["RANK"] = "unchanged"
        engine_policy = policy(Path(old), "vllm", **json.loads(settings))
        engine = build(engine_policy, engine_ranks=2, rank_in_engine=ENGINE.index(rank), seed=0)
        assert os.environ["RANK"] == "unchanged" and "LOCAL_RANK" not in os.environ
        weights = [load_file(Path(folder) / "model.safetensors") for folder in (old, new)]
        refit(engine, weights[0], 0)
        results = [drawn(engine, 0.0)]
        refit(engine, weights[1], 1)
        results += [drawn(engine, temperature) for temperature in (0.0, 1.0)]
        results.append(drawn(engine, 1.0, stop=STOP))
        received = sum(region.box.numel for unit in engine.layout() for region in unit.regions)
        reply = {"results": results, "received": received, "cut": cut(engine)}
        scored = engine.likelihoods(texts())
        reply["scored"] = [(likelihood.logprobs.tolist(), likelihood.greedy.tolist()) for likelihood in scored]
        reply["in_flight"] = [drive(engine, CASES["vllm"], weights, recompute).packed() for recompute in (True, False)]
        shared_memory = os.environ["VLLM_DIST_IDENT"]
        engine.close()
        Path(output).write_text(json.dumps(reply | {"pid": os.getpid(), "shared_memory": shared_memory}))
    seen = torch.ones(1)
    dist.all_reduce(seen, group=world)  # the spanning world is still usable after the engine ends
    assert seen.item() == 3
    dist.destroy_process_group()


def texts() -> list[LikelihoodRequest]:
    return [LikelihoodRequest(request.id, request.tokens, 1 + place % 2) for place, request in enumerate(requests(4, 2))]


def drawn(engine, temperature: float, **sampling) -> dict[str, list[int]]:
    done = drain(engine, requests(4, 2, temperature=temperature, **sampling))
    return {id: completion.tokens.tolist() for id, completion in done.items()}


def cut(engine) -> dict[str, tuple[str, list[int]]]:
    """Return finish reasons and tokens of requests, half of them cut after five steps."""
    asked = requests(4, 2)
    engine.add(asked)
    done = [completion for _ in range(5) for completion in engine.step()]
    done += engine.cut([request.id for request in asked[::2] if request.id in engine.progress()])
    while engine.pending:
        done += engine.step()
    return {completion.id: (completion.finish, completion.tokens.tolist()) for completion in done}
