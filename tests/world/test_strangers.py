"""Strangers at the store's port are refused, and a run with strangers at its port ends well.

The strangers use `pipeline.store.auth`, as an attacker who has read the code would.
"""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.store import auth, server, table
from pipeline.store.child_process import Address, start
from pipeline.store.client import RunStore
from tests.world.secret import write_secret
from tests.world.worlds import SIZE


@pytest.fixture
def key():
    return os.urandom(32)


@pytest.fixture
def address(key):
    process, address = start("127.0.0.1", key)
    yield address
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()


def connect(address) -> socket.socket:
    return socket.create_connection(address, timeout=20)


def read(connection: socket.socket, size: int) -> bytes:
    """Return that many bytes, or fewer if the other end closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while len(data) < size and (more := connection.recv(size - len(data))):
            data += more
    return data


def refused(connection: socket.socket) -> bool:
    """Assert that the store refuses the connection and closes it, with or without a message."""
    return read(connection, 1000) in (b"", auth.REFUSED)


def request(channel: auth.Channel) -> bytes:
    return channel.seal(server._encode(table.Set("stolen", b"1")))


def open_by_hand(address, key) -> tuple[socket.socket, auth.Channel, bytes]:
    connection = connect(address)
    challenge = read(connection, auth.CHALLENGE)
    answer = auth.answer(key, challenge)
    connection.sendall(answer)
    return connection, auth.open_channel(key, challenge, answer, read(connection, auth.MAC)), answer


# ---- refused connections ------------------------------------------------------------------------------------------------


GARBAGE = {"a request": b"GET / HTTP/1.1\r\n\r\n" * 10, "a megabyte": os.urandom(1 << 20), "zeros": bytes(auth.ANSWER)}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused(address, key, said):
    with connect(address) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(said)
        read(connection, auth.CHALLENGE)
        assert refused(connection)
    assert RunStore(address, key, 10).num_keys() == 0


def test_wrong_secrets_and_those_of_other_attempts_are_refused(address, tmp_path):
    with pytest.raises(PermissionError, match="the rank has another secret, or belongs to another attempt"):
        RunStore(address, os.urandom(32), 5)
    write_secret(tmp_path)
    process, address = start("127.0.0.1", auth.attempt_key(tmp_path, "17-0"))
    with process:
        with pytest.raises(PermissionError, match="the rank has another secret, or belongs to another attempt"):
            RunStore(address, auth.attempt_key(tmp_path, "17-1"), 5)
        assert RunStore(address, auth.attempt_key(tmp_path, "17-0"), 5).num_keys() == 0


def test_a_replayed_conversation_is_refused(address, key):
    connection, channel, answer = open_by_hand(address, key)
    message = request(channel)
    connection.sendall(message)
    read(connection, 1)
    with connect(address) as stranger:
        read(stranger, auth.CHALLENGE)
        stranger.sendall(answer + message)
        assert refused(stranger)
    connection.sendall(message)  # replayed into the connection that it was made for
    read(connection, auth.HEADER + 3)
    assert refused(connection)


@pytest.mark.parametrize("spoil", [0, auth.LENGTH.size, auth.HEADER + 3], ids=["length", "mac", "message"])
def test_an_altered_message_is_refused(address, key, spoil):
    connection, channel, _ = open_by_hand(address, key)
    message = bytearray(request(channel))
    message[spoil] ^= 1
    connection.sendall(message)
    connection.shutdown(socket.SHUT_WR)
    assert refused(connection)
    assert not RunStore(address, key, 10).check(["stolen"])


def test_a_rank_sends_nothing_to_a_server_without_the_key(key):
    challenge = auth.challenge()
    with pytest.raises(auth.AuthenticationError, match="does not know this attempt's secret"):
        auth.open_channel(key, challenge, auth.answer(key, challenge), os.urandom(auth.MAC))
    with pytest.raises(auth.AuthenticationError, match="is not the store of a run"):
        auth.answer(key, b"220 smtp.example.org ESMTP" + bytes(40))


@pytest.mark.parametrize("until_closed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_silent_connections_do_not_keep_ranks_out(key, capfd, until_closed):
    process, address = start("127.0.0.1", key)
    with process:
        begun = time.monotonic()
        crowd = [connect(address) for _ in range(200)]
        crowd[0].sendall(os.urandom(auth.ANSWER - 1))
        assert RunStore(address, key, 10).add("n", 1) == 1
        assert time.monotonic() - begun < auth.AUTH_TIMEOUT_S, "it was only let in when the crowd had been closed"
        for connection in crowd:
            if until_closed:
                assert read(connection, auth.CHALLENGE)
                assert refused(connection)
            connection.close()
    told = [line for line in capfd.readouterr().err.splitlines() if "refused a connection" in line]
    assert len(told) == until_closed
    assert all(line.endswith(" refused a connection from 127.0.0.1: it did not authenticate in time") for line in told)


@pytest.fixture
def served(key):
    """Yield the address of a store that a thread of this process serves."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    loop, store = asyncio.new_event_loop(), server.StoreServer(key)
    loop.run_until_complete(loop.create_server(lambda: server.Connection(store), sock=listener))
    serving = threading.Thread(target=loop.run_forever)
    serving.start()
    yield Address(*listener.getsockname())
    loop.call_soon_threadsafe(loop.stop)
    serving.join(10)
    listener.close()
    loop.close()


def test_ranks_that_displace_each_other_all_join(served, key, monkeypatch):
    """There are more of them than the store lets wait unverified."""
    monkeypatch.setattr(server, "MAX_UNAUTHENTICATED", 4)
    dropped: list[str] = []
    monkeypatch.setattr(server.Server, "log_refusal", lambda self, host, why: dropped.append(why))
    crowd = [connect(served) for _ in range(4)]  # sends nothing
    with ThreadPoolExecutor(40) as pool:
        ranks = list(pool.map(lambda _: RunStore(served, key, 30), range(40)))
    assert sum(rank.add("n", 1) == 40 for rank in ranks) == 1
    assert set(dropped) == {"too many unauthenticated connections"} and len(dropped) >= len(crowd)
    for connection in crowd:
        connection.close()


def test_a_rank_that_authenticates_too_late_may_try_again(served, monkeypatch):
    monkeypatch.setattr(auth, "AUTH_TIMEOUT_S", 0.2)
    with connect(served) as connection:
        assert read(connection, 1000)[auth.CHALLENGE :] == b""


def test_the_secret_must_exist_and_be_private_and_complete(tmp_path):
    with pytest.raises(FileNotFoundError, match="submit the run again"):
        auth.attempt_key(tmp_path, "1", wait_s=0.1)
    write_secret(tmp_path, mode=0o640)
    with pytest.raises(PermissionError, match=r"others may read .*\.secret \(mode 0640\)"):
        auth.attempt_key(tmp_path, "1")
    write_secret(tmp_path)
    assert auth.attempt_key(tmp_path, "1") != auth.attempt_key(tmp_path, "2")
    (tmp_path / ".secret").write_text("abcd\n")
    with pytest.raises(ValueError, match="got 2 bytes; expected 32"):
        auth.attempt_key(tmp_path, "1")


def test_the_secret_is_not_visible_from_outside(address, key):
    """It is on no command line and in no environment."""
    contents = []
    for path in itertools.product(os.listdir("/proc"), ("cmdline", "environ")):
        with contextlib.suppress(OSError):
            contents.append(Path("/proc", *path).read_bytes())
    assert any(b"pytest" in content for content in contents)
    assert not [content for content in contents if key.hex().encode() in content]


# ---- a run with strangers -----------------------------------------------------------------------------------------------


def test_a_run_with_strangers_at_its_store_ends_well(start):
    world = start("strangers")
    world.until("ready")
    address = Address(**json.loads(next(world.run_dir.glob("attempts/*/rendezvous.json")).read_text()))
    crowd = [connect(address) for _ in range(100)]
    for said in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 20)):
        with connect(address) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(said)
    with pytest.raises(PermissionError):
        RunStore(address, os.urandom(32), 5)
    (world.run_dir / "enough").touch()
    assert world.wait() == [0] * SIZE, [world.log(rank)[-2000:] for rank in range(SIZE)]
    assert "refused a connection from 127.0.0.1: it does not know this attempt's secret" in world.log(0)
    assert world.log(0).count("refused a connection") <= 2
    for connection in crowd:
        connection.close()
