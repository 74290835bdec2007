"""Errors that may be only the consequence of another rank's end are told from a rank's own, whatever their causes are."""

import pytest

from pipeline.job.watchdog import PeerError, may_be_echo


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (ValueError("a wrong key"), False),
        (PeerError("rank 2 failed"), True),
        (RuntimeError("[Rank 1] Connection closed by peer [10.0.0.2]:4711"), True),
        (caused(ValueError("a layer"), ConnectionResetError("reset")), True),
        (caused(ValueError("outer"), KeyError("inner")), False),
    ],
    ids=["its own", "a peer's", "gloo's", "caused by a socket", "caused by its own"],
)
def test_an_error_or_its_causes(error, echo):
    assert may_be_echo(error) is echo


@pytest.mark.timeout(10)
def test_causes_that_lead_back_to_the_error():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert may_be_echo(first) is False
    try:
        raise first from first
    except ValueError as error:
        assert may_be_echo(error) is False
