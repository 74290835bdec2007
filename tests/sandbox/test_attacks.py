"""The page's table matches the attacks' results, and the attacks succeed without a sandbox."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.sandbox.sandbox import Sandbox
from tests.sandbox import attacks, container_attacks
from tests.sandbox.conftest import unusable
from tests.sandbox.hosts import LIMITS, Host, can_be_elsewhere

NEAR = "as root" if os.geteuid() == 0 else "as a user"


@pytest.mark.parametrize(
    "column",
    [column if column == NEAR else pytest.param(column, marks=pytest.mark.full) for column in attacks.COLUMNS],
)
def test_the_table_matches_the_attacks_results(column: str):
    if column.endswith("as root") and NEAR != "as root":
        pytest.skip("not root")
    if column != attacks.COLUMNS[-1] and (reason := unusable()):
        pytest.skip(reason)
    if column in attacks.IN_IMAGE and not can_be_elsewhere():
        pytest.skip("no Python here to put into an image")
    host = attacks.host_of(column)
    try:
        if host.place != "here" and not (can_be_elsewhere() and host.works()):
            pytest.skip(f"the sandbox does not work here {column}")
        found, told = attacks.found(host), attacks.on_the_page()[column]
        may_differ = {attempt for attempt in attacks.REFUSED_IN_CONTAINERS if told[attempt] == attacks.THROUGH}
        assert {a: cell for a, cell in found.items() if a not in may_differ} == {
            a: cell for a, cell in told.items() if a not in may_differ
        }
    finally:
        host.close()


@pytest.mark.parametrize("attack", container_attacks.ATTACKS)
def test_attacks_by_several_programs(attack: str, image_root: Path, image_host: Host):
    limits = replace(LIMITS, wall_s=20.0, cpu_s=10.0, open_files=64)
    attacker = container_attacks.Attacker(Sandbox(limits), str(image_root), image_host.told())
    assert container_attacks.ATTACKS[attack](attacker)


@pytest.fixture(scope="module")
def image_host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


def test_the_table_is_formatted_as_written():
    page = attacks.on_the_page()
    assert tuple(page) == attacks.COLUMNS
    assert attacks.table(page) in attacks.PAGE.read_text()


def test_each_reach_can_fail():
    """Without isolation everything passes but what is always limited, so no attack is empty."""
    free = attacks.on_the_page()[attacks.COLUMNS[-1]]
    held = {attempt for attempt in attacks.REACHES if free[attempt] == attacks.HELD}
    assert held == {"read a token from its own environment", "have the machine's core handler started"}
