"""The steps after which a run that samples validates."""

from pipeline.config import GRPOConfig
from pipeline.coordination.run_progress import validates


def steps(**keys: object) -> list[int]:
    section = GRPOConfig(max_num_steps=10, **keys)  # type: ignore[arg-type]
    return [step for step in range(1, 11) if validates(section, step, step == 10)]


def test_validation_has_a_period_and_may_end_the_run() -> None:
    assert steps() == []
    assert steps(val_period=3) == [3, 6, 9]
    assert steps(val_period=3, val_at_end=True) == [3, 6, 9, 10]
