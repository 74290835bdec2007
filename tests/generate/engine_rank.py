"""One of three ranks: a bystander, and the two of an engine. Run by test_vllm.

python -m tests.generate.engine_rank RANK RENDEZVOUS OLD_FOLDER NEW_FOLDER OUTPUT VLLM_CFG
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.generate.tiny import drain, policy, refit, requests

BYSTANDER, ENGINE = 0, (1, 2)


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
        received = sum(region.box.numel for unit in engine.layout() for region in unit.regions)
        reply = {"results": results, "received": received, "in_flight": in_flight(engine, weights[0])}
        shared_memory = os.environ["VLLM_DIST_IDENT"]
        engine.close()
        Path(output).write_text(json.dumps(reply | {"pid": os.getpid(), "shared_memory": shared_memory}))
    seen = torch.ones(1)
    dist.all_reduce(seen, group=world)  # the spanning world has outlived the engine
    assert seen.item() == 3
    dist.destroy_process_group()


def drawn(engine, temperature: float) -> dict[str, list[int]]:
    done = drain(engine, requests(4, 2, temperature=temperature))
    return {id: completion.tokens.tolist() for id, completion in done.items()}


def in_flight(engine, weights) -> dict[str, tuple]:
    """Tokens, log-probs and spans of requests under which the weights become these, version 2."""
    engine.add(requests(4, 2, max_new_tokens=12))
    done = [completion for _ in range(6) for completion in engine.step()]
    refit(engine, weights, 2)
    while engine.pending:
        done += engine.step()
    return {c.id: (c.tokens.tolist(), c.logprobs.tolist(), [(s.version, s.tokens) for s in c.spans]) for c in done}


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
