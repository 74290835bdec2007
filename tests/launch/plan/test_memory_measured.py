"""Predicted memory is within a tenth of what the real backends use. The table: python -m tests.launch.plan memory"""

import pytest

from tests.launch.plan import measure
from tests.launch.plan.memory_cases import CASES

TOLERANCE = 0.1
SHARP = ("tiny_sft_megatron", "fsdp_tiny_1_bfloat16_recomputed", "megatron_tiny_moe_1_float32")
REST = [name for name, case in CASES.items() if name not in SHARP]


def off_by(name: str, folder) -> float:
    predicted, _ = CASES[name].predicted()
    return predicted / measure.measured(CASES[name], folder) - 1


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.full) for name in SHARP[:2]), SHARP[2]])
def test_tensors(name, tmp_path):
    assert abs(off_by(name, tmp_path)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("name", REST)
def test_tensors_of_every_layout(name, tmp_path):
    assert abs(off_by(name, tmp_path)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(("model", "precision"), measure.ENGINES)
def test_vllms_memory_equals_the_prediction(model, precision, tmp_path):
    parts = measure.engine(model, precision, tmp_path)
    assert parts.keys() == {"weights", "KV cache", "tokens"}
    for part, (predicted, found) in parts.items():
        assert predicted == pytest.approx(found, rel=0.01), part


def test_peaks_start_from_the_allocations_at_a_mark():
    marks = [measure.Mark(0, "a", 10, {1}), measure.Mark(0, "b", 20, {1, 2}), measure.Mark(1, "end", 30, set())]
    changes = [(1, 1, 100), (2, 9, 50), (11, 2, 5), (12, 3, 7), (13, 3, -7), (21, 2, 6), (22, 1, -100), (31, 8, 1000)]
    # 9 was released unseen before the mark, and at 21 the address 2 is given out again.
    assert measure.peaks(changes, marks) == {"a": [112], "b": [106]}
