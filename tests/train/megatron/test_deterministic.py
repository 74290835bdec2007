"""policy.deterministic with Megatron-Core: its own switch is on, and on a CPU the bits stay as they are."""

import pytest

from tests.train.test_deterministic import ON, built, equal, steps, switches

pytestmark = pytest.mark.usefixtures("switches_restored")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_megatron_switches_it_on_and_computes_the_same_bits(models, realm, family):
    other = built(models / family, "megatron", False)
    assert not other._stage.config.deterministic_mode
    expected = steps(other)
    trained = built(models / family, "megatron", True)
    assert trained._stage.config.deterministic_mode and switches() == ON
    assert equal(steps(trained), expected)
