"""Plans of shipped recipes and their tables, for tests."""

from __future__ import annotations

import functools

from launch.plan import backend_choice, plan_table, variants
from launch.plan.estimate import Plan, plan
from pipeline import config


@functools.cache
def planned(name: str, *overrides: str) -> Plan:
    return plan(*backend_choice.choose(config.load(name, ["run_dir=runs/none", *overrides])))


def table(found: Plan, compared: bool = False) -> str:
    """Return the report as one line with single spaces, and assert that its lines are not too long."""
    text = plan_table.text(found, variants.compare(found) if compared else ())
    assert max(map(len, text.splitlines())) <= plan_table.WIDTH
    return " ".join(text.split())
