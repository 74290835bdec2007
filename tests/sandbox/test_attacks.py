"""The page's table matches the attacks' results, and the attacks succeed without a sandbox."""

import os

import pytest

from tests.sandbox import attacks
from tests.sandbox.conftest import unusable
from tests.sandbox.hosts import can_be_elsewhere

NEAR = "as root" if os.geteuid() == 0 else "as a user"
IN_IMAGE = f"in an image, {NEAR}"


@pytest.mark.parametrize(
    "column",
    [column if column in (NEAR, IN_IMAGE) else pytest.param(column, marks=pytest.mark.full) for column in attacks.COLUMNS],
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


def test_the_table_is_formatted_as_written():
    page = attacks.on_the_page()
    assert tuple(page) == attacks.COLUMNS
    assert attacks.table(page) in attacks.PAGE.read_text()


def test_each_reach_can_fail():
    """Without isolation everything passes but what is always limited, so no attack is empty."""
    free = attacks.on_the_page()[attacks.COLUMNS[-1]]
    held = {attempt for attempt in attacks.REACHES if free[attempt] == attacks.HELD}
    assert held == {"read a token from its own environment", "have the machine's core handler started"}
