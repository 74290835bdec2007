"""One of three ranks: a bystander, and the two of a tensor-parallel engine. Run by test_vllm.

python -m tests.generate.tensor_parallel_rank RANK RENDEZVOUS OLD_FOLDER NEW_FOLDER OUTPUT
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.generate.tiny import drain, policy, requests

BYSTANDER, ENGINE = 0, (1, 2)


def main(rank: int, rendezvous: str, old: str, new: str, output: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    world = dist.group.WORLD
    groups = [dist.new_group([BYSTANDER]), dist.new_group(ENGINE)]
    dist.group.WORLD = groups[rank in ENGINE]
    if rank in ENGINE:
        from pipeline.generate import build

        os.environ["RANK"] = "unchanged"
        engine = build(policy(Path(old), "vllm"), engine_ranks=2, rank_in_engine=ENGINE.index(rank), seed=0)
        assert os.environ["RANK"] == "unchanged" and "LOCAL_RANK" not in os.environ
        results = []
        for version, folder in enumerate((old, new)):
            engine.load_weights(load_file(Path(folder) / "model.safetensors").items(), version)
            for temperature in (0.0, 1.0):
                done = drain(engine, requests(4, 2, temperature=temperature))
                results.append({id: completion.tokens.tolist() for id, completion in done.items()})
        engine.close()
        shared_memory = os.environ["VLLM_DIST_IDENT"]
        Path(output).write_text(json.dumps({"results": results, "pid": os.getpid(), "shared_memory": shared_memory}))
    seen = torch.ones(1)
    dist.all_reduce(seen, group=world)  # the spanning world has outlived the engine
    assert seen.item() == 3
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
