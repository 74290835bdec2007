"""One rank of a node checks that all files of a checkpoint are visible there, and the others load after it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from pipeline.checkpoints.checkpoint import Checkpoints
from pipeline.config import CheckpointingConfig, TimeoutsConfig
from pipeline.roles import TrainRole
from pipeline.roles import train as module
from tests import fork_server

LATE_S = 1.0


class Model:
    """The part of a backend that loads."""

    def __init__(self, rank: int, notes: Path):
        self.rank, self.notes = rank, notes

    def load(self, folder: Path, key: None) -> None:
        (self.notes / f"loaded.{self.rank}").write_text(f"{time.time()} {folder}")


def restore(rank: int, notes: Path) -> None:
    """Restore on one of two ranks of a node that sees a checkpoint late."""
    dist.init_process_group("gloo", init_method=f"file://{notes / 'rendezvous'}", rank=rank, world_size=2)

    def see(folder: Path) -> None:
        time.sleep(LATE_S)
        (notes / f"seen.{rank}").write_text(f"{time.time()} {folder}")

    module.wait_until_seen = see
    info = SimpleNamespace(local_rank=rank, run_dir=notes)
    world = SimpleNamespace(own=dist.group.WORLD, rank=rank, info=info, phase=contextlib.nullcontext)
    recipe = SimpleNamespace(cluster=SimpleNamespace(timeouts=TimeoutsConfig()), checkpointing=CheckpointingConfig())
    role = TrainRole(recipe, 0, world, SimpleNamespace(losses={"policy": None}), None)
    role._models["policy"] = Model(rank, notes)
    role.restore(str(notes / "checkpoints/step_000001"))
    dist.destroy_process_group()


def test_a_rank_loads_after_another_rank_of_its_node_has_seen_all_files(tmp_path):
    checkpoints = Checkpoints(tmp_path, "attempt", CheckpointingConfig())
    checkpoints.commit(checkpoints.begin(1), 1, None, {})
    fork_server.run(restore, (tmp_path,), 2)
    assert not (tmp_path / "seen.1").exists()
    when = {}
    for name in ("seen.0", "loaded.0", "loaded.1"):
        told, folder = (tmp_path / name).read_text().split()
        assert folder == str(tmp_path / "checkpoints/step_000001")
        when[name] = float(told)
    assert when["seen.0"] <= min(when["loaded.0"], when["loaded.1"])
