"""Plans of shipped recipes and their tables, for tests."""

from __future__ import annotations

import functools

from launch import backend
from launch.plan import modes, report
from launch.plan.estimate import Plan, plan
from pipeline import config


@functools.cache
def planned(name: str, *overrides: str) -> Plan:
    return plan(*backend.choose(config.load(name, ["run_dir=runs/none", *overrides])))


def table(found: Plan, compared: bool = False) -> str:
    """Return the report as one line with single spaces, and assert that its lines are not too long."""
    text = report.text(found, modes.compare(found) if compared else ())
    assert max(map(len, text.splitlines())) <= report.WIDTH
    return " ".join(text.split())
