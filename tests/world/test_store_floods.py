"""Floods of strangers at the store's port: ranks still join, even with few open files allowed, and the log stays short."""

import errno
import os
import resource
import socket
import threading
import time

import pytest

from pipeline.store import auth, relay
from pipeline.store.child_process import start
from pipeline.store.client import RunStore
from tests.world.crowd import crowd

LONGEST_LOG = 20_000  # bytes


@pytest.fixture
def key():
    return os.urandom(32)


@pytest.fixture(params=["store", pytest.param("relay", marks=pytest.mark.full)])
def at(request, key):
    """Yield (address, process, join function) of a store or a relay that strangers can reach."""
    process, address = start("127.0.0.1", key)
    if request.param == "store":
        yield address, process
    else:
        relaying, near = relay.start(address, key, 3, 1.0, 30.0)
        yield near, relaying
        end(relaying)
    end(process)


def end(process) -> None:
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()


def limit(process, files: int) -> None:
    """Limit a process's open files, as a low hard limit does."""
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))


def join(address, key, timeout_s: float) -> float:
    """Return the seconds until a rank is answered."""
    begun = time.monotonic()
    store = RunStore(address, key, timeout_s)
    store.exchange("here", b"", [])
    store._socket.close()
    return time.monotonic() - begun


MANY = [(256, 700), pytest.param(1024, 2700, marks=pytest.mark.full)]


@pytest.mark.parametrize(("files", "strangers"), MANY)
def test_strangers_do_not_exhaust_open_files(at, key, capfd, files, strangers):
    address, process = at
    limit(process, files)
    rank = RunStore(address, key, 10)
    with crowd(address, strangers):
        assert join(address, key, 30) < auth.AUTH_TIMEOUT_S, "it was only let in when strangers had been closed"
        rank.exchange("here", b"", [])  # still works
    assert len(capfd.readouterr().err) < LONGEST_LOG


@pytest.mark.parametrize(("files", "strangers"), MANY)
def test_ranks_join_while_disconnected_strangers_reconnect(at, key, capfd, files, strangers):
    address, process = at
    limit(process, files)
    with crowd(address, strangers, again=True):
        for _ in range(20):
            join(address, key, 60)
    assert len(capfd.readouterr().err) < LONGEST_LOG


def test_ranks_that_exhaust_open_files_leave_a_short_log(key, capfd):
    process, address = start("127.0.0.1", key)
    ranks = [RunStore(address, key, 10) for _ in range(25)]
    limit(process, 20)
    late = [socket.create_connection(address) for _ in range(10)]
    time.sleep(1.2)  # asyncio tries again each second
    said = capfd.readouterr().err
    assert "Too many open files" in said and len(said) < LONGEST_LOG
    for rank in ranks[:20]:
        rank._socket.close()
    join(address, key, 30)
    for stranger in late:
        stranger.close()
    end(process)


def test_a_full_packet_filter_fails_no_join(key, monkeypatch):
    """The kernel answers EPERM then; the store did not refuse."""
    process, address = start("127.0.0.1", key)
    connect, tries = socket.create_connection, []

    def filtered(*given, **more):
        tries.append(given)
        if len(tries) < 3:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return connect(*given, **more)

    monkeypatch.setattr(socket, "create_connection", filtered)
    assert join(address, key, 10) and len(tries) == 3
    end(process)


def test_a_server_that_answers_a_byte_at_a_time_does_not_block_a_rank(key, monkeypatch):
    monkeypatch.setattr(auth, "AUTH_TIMEOUT_S", 1.5)
    listener = socket.create_server(("127.0.0.1", 0))

    def trickle() -> None:
        while True:
            try:
                connection, _ = listener.accept()
                for byte in auth.GREETING * 4:
                    connection.sendall(bytes([byte]))
                    time.sleep(1.2)
            except ConnectionError:
                continue
            except OSError:
                return

    threading.Thread(target=trickle, daemon=True).start()
    begun = time.monotonic()
    with pytest.raises(ConnectionError, match="cannot be reached"):
        auth.connect(listener.getsockname(), key, time.monotonic() + 1)
    assert time.monotonic() - begun < 15  # the greeting alone takes 19 s
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
