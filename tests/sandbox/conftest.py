"""Fixtures with hosts for hostile programs: the default one; in long runs each backend as this and as another user."""

import functools
from collections.abc import Iterator

import pytest

from pipeline.sandbox import backends
from pipeline.sandbox.limits import ISOLATING_BACKENDS, SandboxError
from tests.sandbox.hosts import Host, can_be_another


@functools.cache
def works(way: str) -> str:
    """Return why the backend does not work here, else nothing."""
    try:
        backends.choose(way)
    except SandboxError as error:
        return str(error)
    return ""


HOSTS = [
    "auto",
    *(
        pytest.param(host, marks=pytest.mark.long)
        for host in (*ISOLATING_BACKENDS, *(f"{way} as another" for way in ISOLATING_BACKENDS))
    ),
]


@pytest.fixture(params=HOSTS, scope="session")
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    way, _, another = request.param.partition(" ")
    if another and not can_be_another():
        pytest.skip("not root, or no Python here that another user may run")
    if not another and works(way):
        pytest.skip(f"{way} does not work here for this user")
    made = Host(way, bool(another))
    if another and not made.works():
        made.close()
        pytest.skip(f"{way} does not work here for another user")
    yield made
    made.close()


@pytest.fixture(params=["none", pytest.param("none as another", marks=pytest.mark.full)], scope="session")
def free(request: pytest.FixtureRequest) -> Iterator[Host]:
    """Return a host where only limits restrict a program."""
    way, _, another = request.param.partition(" ")
    if another and not can_be_another():
        pytest.skip("not root, or no Python here that another user may run")
    made = Host(way, bool(another))
    yield made
    made.close()
