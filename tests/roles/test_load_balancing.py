"""The policy of a step has the load-balancing loss, over all of its sequences; the critic has none."""

import pytest

from tests.roles.test_schedule_steps import BOTH, EPOCHS, UPDATES, learn, megatron_ended, realm, role  # noqa: F401

MODEL = ("policy.model_name=recipes/tiny_moe", "policy.tokenizer.name=recipes/tiny", "policy.moe_aux_loss_coeff=0.01")
BACKENDS = {"dtensor": (), "megatron": ("policy.megatron_cfg.freeze_moe_router=false",)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_update_of_the_policy_balances(backend, megatron_ended, tmp_path):  # noqa: F811
    metrics = learn(role(backend, tmp_path, *MODEL, *BACKENDS[backend]), 1, BOTH)
    assert len(metrics["policy"]) == UPDATES * EPOCHS
    for policy, critic in zip(metrics["policy"], metrics["critic"], strict=True):
        assert 1 < policy["moe_aux_loss"] < 1.5 and "moe_aux_loss" not in critic  # 4 experts, of which a token goes to 2
        assert 1 < policy["moe_load_imbalance"] <= policy["moe_load_imbalance_max"] < 2
