"""Fuzz the store's protocol.

A case depends on its seed alone. A rank talks to the store, to its node's relay, or through a relay to the store. An attacker
without the key changes one message: it alters, truncates, repeats, reflects, delays, drops or replaces it. Further cases send
requests that no rank sends, signed with the right key.

A rank must get right answers or an expected error (a lost connection or a refusal). No process may end or print a traceback,
the store may hold only what ranks have stored, and a rank that is not attacked must be served throughout.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec
import torch.distributed as dist

from pipeline.store import auth, client, messaging, relay, table
from pipeline.store.child_process import Address, start
from pipeline.store.client import RunStore
from tests.world.wire import ACTIONS, DOWN, UP, Case, RecordedMessages, attacked

WORKERS = 8
IMPATIENCE_S = 0.5  # seconds that an attacked rank waits for an answer
JOIN_S = 5.0
BOUND_S = 30.0  # seconds that a case may take
WAYS = ("store", "relay", "upstream")  # what a rank connects to; upstream: a relay whose own connection is attacked


@dataclass
class Outcome:
    case: Case
    came: str  # right; lost, refused: errors that are expected; wrong
    why: str = ""
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        return self.came == "wrong" or (self.case.harmless and self.came != "right") or self.seconds > BOUND_S


def case(number: int, seed: int) -> Case:
    chance = random.Random(f"{seed}/{number}")
    way = chance.choices(WAYS, (57, 40, 3))[0]
    direction, action = chance.choice((UP, DOWN)), chance.choice([*ACTIONS, "insider"])
    if action == "insider":
        way, direction = ("store", UP) if way == "upstream" else (way, UP)
    return Case(number, f"{seed}/{number}/what", way, direction, chance.choice((0, 0, 1, 1, 2, 2, 3, 4, 6, 9)), action)


# ---- requests of ranks -------------------------------------------------------------------------------------------------------


def value(key: str) -> bytes:
    """Return the only value that ranks store by a key."""
    return sha256(key.encode()).digest() * (1 + len(key) % 100)


class Patient(RunStore):
    """Return a patient connection for a rank that is not attacked, so that a busy machine does not count as a failure."""

    def _round_trip(self, request: table.StoreRequest | None, replied: bool, timeout_s: float = 0.0) -> bytes:
        return super()._round_trip(request, replied, timeout_s + BOUND_S)


def speak(store: RunStore, name: str, relayed: bool) -> None:
    """Send some requests. Raises AssertionError if an answer is wrong."""
    for i in range(5):
        key = f"{name}/{i}" if relayed else f"{name}/{i}{'x' * 500 * i}"
        seen = store.exchange(key, value(key), [key])
        assert seen[0] in ((None, value(key)) if relayed else (value(key),)), "a wrong value was read"
        store.send(messaging.Answers([messaging.VerbReply(1, [0], "verb", b"")]))
        if relayed:
            continue
        assert store.get(key) == value(key), "a wrong value was read"
        assert store.check([key]) and not store.check([f"{key}/absent"]), "a wrong answer to check"
        store.queue_push(f"queue/{name}", value(key))
        assert store.queue_pop(f"queue/{name}") == value(key), "a wrong value was taken from a queue"


def requests(chance: random.Random, name: str) -> Iterator[bytes]:
    """Yield requests, valid or not, that a holder of the key can send."""
    odd = (0, -1, 1 << 62, 0.0, -1.0, 1e308, float("inf"), "", "x", b"", b"1", None, [], [[]], {}, True, [""], {"": b""})
    kinds = [
        kind for kind in table.StoreRequest.__subclasses__() if kind is not messaging.OneWay
    ] + messaging.OneWay.__subclasses__()
    for _ in range(chance.randrange(1, 30)):
        match chance.randrange(5):
            case 0:
                yield chance.randbytes(chance.randrange(200))
            case 1:
                yield msgspec.msgpack.encode([chance.choice(kinds).__name__, *chance.choices(odd, k=chance.randrange(5))])
            case 2:
                yield b"\x91" * chance.randrange(1, 100_000)
            case _:
                yield msgspec.msgpack.encode(_right(chance, chance.choice(kinds), name))


def _right(chance: random.Random, kind: type[table.StoreRequest], name: str) -> table.StoreRequest:
    """Return a request whose fields have the right types."""
    makes = {
        "str": lambda: f"insider/{name}/{chance.randrange(3)}",
        "bytes": lambda: chance.choice((b"", b"1", chance.randbytes(1000))),
        "int": lambda: chance.choice((0, 1, -1, 7, (1 << 63) - 1, -(1 << 63))),
        "float": lambda: chance.choice((0.0, 0.05, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))),
        "bool": lambda: chance.random() < 0.5,
        "list[str]": lambda: [f"insider/{name}/{i}" for i in range(chance.randrange(3))],
        "list[bytes]": lambda: [b"1"] * chance.randrange(3),
        "list[int]": lambda: [1_000_000 + chance.randrange(9) for _ in range(chance.randrange(3))],
        "dict[str, bytes]": lambda: {f"insider/{name}/{i}": b"1" for i in range(chance.randrange(3))},
        "list[Part]": lambda: [([1_000_000 + chance.randrange(9)], b"x") for _ in range(chance.randrange(3))],
        "list[Answer]": lambda: (
            [messaging.VerbReply(chance.randrange(9), [1], "v", b"", more=chance.random() < 0.5)] * chance.randrange(3)
        ),
    }
    return kind(*(makes[kind.__annotations__[name]]() for name in kind.__struct_fields__))


def betray(case: Case, address: Address, key: bytes) -> None:
    """Send requests that no rank sends, signed with the right key."""
    chance = random.Random(case.seed)
    connection, channel = auth.connect(address, key, time.monotonic() + JOIN_S)
    with connection, contextlib.suppress(OSError):
        connection.settimeout(IMPATIENCE_S)
        for message in requests(chance, str(case.number)):
            connection.sendall(channel.seal(message))
            if chance.random() < 0.3:
                connection.recv(1 << 16)


# ---- running them ------------------------------------------------------------------------------------------------------------


def run(case: Case, house: House) -> Outcome:
    begun = time.monotonic()
    try:
        if case.action == "insider":
            betray(case, house.addresses[case.way], house.key)
        elif case.way == "upstream":
            _through_relay(case, house)
        else:
            with attacked(case, house.addresses[case.way], house.heard) as address:
                store = Patient(address, house.key, BOUND_S) if case.harmless else RunStore(address, house.key, JOIN_S)
                with contextlib.closing(store._socket):
                    speak(store, str(case.number % 50 if case.way == "relay" else case.number), case.way == "relay")
        came, why = "right", ""
    except dist.DistNetworkError as error:
        came, why = "lost", str(error)
    except auth.Refused as error:
        came, why = "refused", str(error)
    except Exception as error:
        came, why = "wrong", f"{type(error).__name__}: {error}"[:500]
    return Outcome(case, came, why, time.monotonic() - begun)


def _through_relay(case: Case, house: House) -> None:
    """Yield a new relay whose connection to the store is attacked."""
    with attacked(case, house.addresses["store"], house.heard) as address:
        try:
            wait_s = BOUND_S if case.harmless else JOIN_S
            process, near = relay.start(address, house.key, 1_000_000 + case.number, 0.05, wait_s)
        except RuntimeError as error:  # it logs the reason as it ends
            raise dist.DistNetworkError(str(error)) from error
        try:
            store = (Patient if case.harmless else RunStore)(near, house.key, wait_s)
            with contextlib.closing(store._socket):
                for i in range(3):
                    speak(store, f"{case.number % 50}/{i}", relayed=True)
                    time.sleep(0.06)  # after it has exchanged heartbeats
        finally:
            process.stdin.close()
            status = process.wait(BOUND_S)
            process.stdout.close()
        assert status in (0, relay.STORE_GONE), f"the relay has ended with status {status}"


@dataclass
class House:
    """A store, its relay, and a rank that both serve."""

    key: bytes
    log: Path
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    addresses: dict[str, Address] = field(default_factory=dict)
    heard: RecordedMessages = field(default_factory=RecordedMessages)
    slowest_s: float = 0.0  # the error of the rank that is not attacked
    served: int = 0
    harmed: list[str] = field(default_factory=list)

    def memory(self) -> dict[str, float]:
        """Return the MB that each process holds."""
        alive = {name: process.pid for name, process in self.processes.items() if process.poll() is None}
        status = {name: Path(f"/proc/{pid}/status").read_text() for name, pid in alive.items()}
        return {name: int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1e3 for name, text in status.items()}

    def watch(self, ended: threading.Event) -> None:
        """Run a rank that is not attacked: one connection stays, another joins again and again."""
        try:
            store = RunStore(self.addresses["store"], self.key, BOUND_S)
            store.set("beside", value("beside"))
            while not ended.wait(0.02):
                begun = time.monotonic()
                assert store.multi_get(["beside"]) == [value("beside")], "a wrong value was read"
                for address in self.addresses.values():
                    connection, _ = auth.connect(address, self.key, time.monotonic() + BOUND_S)
                    connection.close()
                self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
                self.served += 1
        except Exception as error:
            self.harmed.append(f"the rank beside it: {type(error).__name__}: {error}")

    def wrongs(self) -> list[str]:
        """Return what is wrong with the processes, the log and the stored keys."""
        found = list(self.harmed)
        found += [
            f"the {name} has ended: {each.returncode}" for name, each in self.processes.items() if each.poll() is not None
        ]
        if found:
            return [*found, self.log.read_text(errors="replace")[-3000:]]
        store = RunStore(self.addresses["store"], self.key, BOUND_S)
        kept = [key for key in store.list_keys() if key not in ("", "x") and not key.startswith(("insider/", "lost/"))]
        found += [f"{key[:100]} was stored by a stranger" for key in kept if store.get(key) != value(key)]
        said = self.log.read_text(errors="replace")
        if at := [found.start() for found in re.finditer("Traceback|Exception|Error", said)]:
            found.append(f"the log: {said[max(0, at[0] - 200) : at[0] + 3000]}")
        return found


@contextlib.contextmanager
def house() -> Iterator[House]:
    """Shorten the attacked ranks' wait to IMPATIENCE_S and send all processes' output to the log."""
    before = client.REPLY_GRACE_S, auth.AUTH_TIMEOUT_S
    client.REPLY_GRACE_S = auth.AUTH_TIMEOUT_S = IMPATIENCE_S
    errors, key = os.dup(2), os.urandom(32)
    with tempfile.NamedTemporaryFile(prefix="store_fuzz.", suffix=".log") as log:
        os.dup2(log.fileno(), 2)
        try:
            made = House(key, Path(log.name))
            made.processes["store"], made.addresses["store"] = start("127.0.0.1", key)
            made.processes["relay"], made.addresses["relay"] = relay.start(made.addresses["store"], key, 999_999, 0.05, JOIN_S)
            yield made
        finally:
            os.dup2(errors, 2)
            os.close(errors)
            client.REPLY_GRACE_S, auth.AUTH_TIMEOUT_S = before
            for process in reversed(made.processes.values()):
                process.kill()
                process.communicate()


def fuzz(count: int, seed: int, beside: House) -> list[Outcome]:
    """Run that many cases, several at once."""
    ended = threading.Event()
    watching = threading.Thread(target=beside.watch, args=(ended,))
    watching.start()
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(lambda number: run(case(number, seed), beside), range(count)))
    finally:
        ended.set()
        watching.join()
