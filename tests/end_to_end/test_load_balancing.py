"""Whole runs of SFT: the load-balancing loss makes experts more equal, by the same steps on both backends."""

import pytest

from tests.end_to_end.runs import LOCAL, submit
from tests.end_to_end.test_megatron import megatron

pytestmark = pytest.mark.full
MODEL = ("recipe=tiny_sft", "policy.model_name=recipes/tiny_moe", "policy.tokenizer.name=recipes/tiny", "policy.scheduler=null")
STEPS = ("sft.max_num_steps=20", "sft.val_at_end=false", "checkpointing.enabled=false")
BACKENDS = {"fsdp2": (), "megatron": megatron(freeze_moe_router="false")}


def run(folder, *keys: str) -> dict[str, float]:
    """Return the metrics of the last step."""
    done = submit(folder, *LOCAL, *MODEL, *STEPS, *keys)
    assert done.status == 0, done.output
    return done.metrics()[-1]


def test_experts_become_more_equal(tmp_path):
    without = run(tmp_path / "without", "policy.moe_aux_loss_coeff=1e-9")
    ours = {name: run(tmp_path / name, "policy.moe_aux_loss_coeff=0.05", *keys) for name, keys in BACKENDS.items()}
    for last in ours.values():
        assert 0 < last["train/moe_aux_loss"] - 1 < 0.3 * (without["train/moe_aux_loss"] - 1)
        for key in ("train/moe_load_imbalance", "train/moe_load_imbalance_max"):
            assert 0 < last[key] - 1 < 0.7 * (without[key] - 1)
        for key in ("train/loss", "train/grad_norm", "train/moe_aux_loss", "train/moe_load_imbalance"):
            assert last[key] == pytest.approx(ours["fsdp2"][key], rel=1e-4)
