"""Two programs for the sandbox: one serves the functions of an answer, the other runs the tests that call them.

    code_process.py serve bare|imports    loads answer.py and calls its functions, or runs it as a program
    code_process.py judge                 runs tests; each call of the answer's functions goes to stdout as a request

Each runs in a sandbox of its own and exchanges frames with its caller through stdin and stdout: the length in four bytes, then
JSON. An answer never meets its tests: it sees the arguments of one call at a time, and only values of built-in types come back.
So nothing that it does to its own process changes how its values are compared.

The file is copied into the sandbox, so it imports nothing of the pipeline.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import itertools
import json
import os
import struct
import symtable
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

LENGTH = struct.Struct("<I")  # the number of bytes of a frame
VERDICT, REQUEST = b"V", b"C"
"""First byte of the judge's frames."""
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
ITEMS = 1 << 20  # maximum number of items of an iterator
RECURSION = 50_000  # recursion limit, as LiveCodeBench's judge sets it


class NotPlain(TypeError):
    """Raised for a value that has no encoding."""


def encode(value: Any, number: Callable[[Any], int]) -> Any:
    """Return a value in the form of JSON. A value of a subclass of a built-in type becomes one of the built-in type.

    number: a function that returns a number for a value of any other type, or raises NotPlain if it cannot be sent.
    """
    if value is None or isinstance(value, str | bool | float):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else {"int": hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": list(value)}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, number), encode(item, number)] for key, item in value.items()]}
    for kind, sequence_type in SEQUENCES.items():
        if isinstance(value, sequence_type):
            return {kind: [encode(item, number) for item in value]}
    if hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0:  # a scalar of numpy
        return encode(value.item(), number)
    return {"object": number(value)}


def decode(value: Any, find: Callable[[int], Any]) -> Any:
    """Return the value that `encode` turned into JSON. find: a function that returns the value that has a number."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "int":
            return int(content, 16)
        case "complex":
            return complex(*content)
        case "bytes":
            return bytes(content)
        case "range":
            return range(*content)
        case "dict":
            return {decode(key, find): decode(item, find) for key, item in content}
        case "object":
            return find(content)
    return SEQUENCES[kind](decode(item, find) for item in content)


class Frames:
    """Exchanges frames over the process's original stdin and stdout, after which both names lead to /dev/null."""

    def __init__(self) -> None:
        self._input, self._output = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(nothing, descriptor)

    def receive(self) -> Any:
        """Return the next frame. Raises EOFError."""
        (size,) = LENGTH.unpack(self._read(LENGTH.size))
        return json.loads(self._read(size))

    def send(self, content: bytes) -> None:
        """Write a frame."""
        unsent = memoryview(LENGTH.pack(len(content)) + content)
        while unsent:
            unsent = unsent[os.write(self._output, unsent) :]

    def close(self) -> None:
        """Close the descriptors of both directions. For a fork that must not use them."""
        os.close(self._input)
        os.close(self._output)

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = os.read(self._input, size - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


# ---- the answer --------------------------------------------------------------------------------------------------------------


def load(name: str, bare: bool) -> dict[str, Any]:
    """Run answer.py as the module `name` and return its names. bare: leave out the names that `harness.py` imports for it."""
    if not bare:
        return importlib.import_module("harness").load(name)
    answer = sys.modules[name] = types.ModuleType(name)
    answer.__file__ = "answer.py"
    with open("answer.py", "rb") as file:
        exec(compile(file.read(), "answer.py", "exec"), vars(answer))
    return vars(answer)


class AnswerServer:
    """Serves requests to call the functions of an answer and to use their objects."""

    def __init__(self, frames: Frames, bare: bool) -> None:
        self._frames, self._bare = frames, bare
        self._names: dict[str, Any] = {}
        self._objects: dict[int, Any] = {}
        self._solution: Any = None
        if not bare:  # before programs fork from this process
            for module in importlib.import_module("harness").MODULES:
                importlib.import_module(module)

    def serve(self) -> None:
        """Answer each request with {"value": ...}, or with {"error": [type, text]} if it raised, until no more come."""
        while True:
            request = self._frames.receive()
            try:
                reply = {"value": encode(self._do(**request), self._number)}
                content = json.dumps(reply).encode(errors="surrogatepass")
            except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
                content = json.dumps({"error": [type(error).__name__, str(error)[:1000]]}).encode(errors="replace")
            self._frames.send(content)

    def _do(self, op: str, target: Any = None, arguments: Any = None, named: Any = None) -> Any:
        if op == "load":
            self._names = load("solution", self._bare)
            return None
        if op == "run":
            return self._run(str(target))
        receiver = self._objects[target] if isinstance(target, int) else None
        if op == "get":
            return getattr(receiver, arguments)
        if op == "set":
            return setattr(receiver, arguments, decode(named, self._objects.__getitem__))
        if op == "list":
            assert receiver is not None
            return list(itertools.islice(receiver, ITEMS))
        function = self._function(str(target)) if receiver is None else receiver
        return function(*decode(arguments, self._objects.__getitem__), **decode(named, self._objects.__getitem__))

    def _number(self, value: Any) -> int:
        self._objects[id(value)] = value
        return id(value)

    def _function(self, name: str) -> Any:
        """Return a function of the answer, or a method of the only object of its class Solution."""
        if name in self._names:
            return self._names[name]
        if "Solution" not in self._names:
            raise NameError(f"name {name!r} is not defined")
        if self._solution is None:
            self._solution = self._names["Solution"]()
        return getattr(self._solution, name)

    def _run(self, stdin: str) -> list[Any]:
        """Run the answer as a program and return [status, stdout]. The status is 0 after `sys.exit` with any code."""
        with open("stdin", "w", newline="") as file:
            file.write(stdin)
        input_descriptor, output_descriptor = (
            os.open("stdin", os.O_RDONLY),
            os.open("stdout", os.O_RDWR | os.O_CREAT | os.O_TRUNC),
        )
        process = os.fork()
        if process == 0:
            self._frames.close()
            os.dup2(input_descriptor, 0)
            os.dup2(output_descriptor, 1)
            run_program(self._bare)
        _, status = os.waitpid(process, 0)
        os.lseek(output_descriptor, 0, os.SEEK_SET)
        with os.fdopen(output_descriptor, "rb") as file:
            output = file.read()
        os.close(input_descriptor)
        return [os.waitstatus_to_exitcode(status), output.decode(errors="replace")]


def run_program(bare: bool) -> NoReturn:
    """Run the answer as the main program of this process, and exit when its threads and atexit functions have ended."""
    import threading  # only a program needs it

    status = 1
    try:
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 -- until the process ends
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.argv = ["answer.py"]
        try:
            load("__main__", bare)
            status = 0
        except SystemExit:
            status = 0
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        os._exit(1)
    os._exit(status)


# ---- the tests ---------------------------------------------------------------------------------------------------------------


class BrokenTests(BaseException):
    """Raised if the tests cannot run with any answer. Not a subclass of Exception, since tests may catch Exception."""


class RemoteCalls:
    """Calls the functions of the answer and uses the objects that they return."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self.last_error: Exception | None = None  # the last exception of the answer

    def request(self, op: str, target: str | int = "", arguments: Any = None, named: Any = None) -> Any:
        """Return the value of an operation in the answer's process, or raise the exception that it raised."""
        content = {"op": op, "target": target, "arguments": arguments, "named": named}
        self._frames.send(REQUEST + json.dumps(content).encode(errors="surrogatepass"))
        reply = self._frames.receive()
        if "error" in reply:
            self.last_error = _exception(*reply["error"])
            raise self.last_error
        return decode(reply["value"], lambda number: RemoteObject(self, number))

    def call(self, target: str | int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function by its name, or an object. Raises BrokenTests for arguments that cannot be sent."""
        return self.request("call", target, self.encode_value(list(arguments)), self.encode_value(named))

    def encode_value(self, value: Any) -> Any:
        """Return a value that is sent to the answer in the form of JSON."""
        try:
            return encode(value, _number_of)
        except NotPlain as error:
            raise BrokenTests(str(error)) from None

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function that calls the answer's function of this name."""

        def remote(*arguments: Any, **named: Any) -> Any:
            return self.call(name, arguments, named)

        remote.__name__ = name
        return remote


class RemoteObject:
    """Stands for an object in the answer's process. It equals only itself, and has no special methods except those below."""

    def __init__(self, calls: RemoteCalls, number: int) -> None:
        vars(self).update(_calls=calls, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._calls.request("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._calls.request("set", self._number, name, self._calls.encode_value(value))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the object."""
        return self._calls.call(self._number, arguments, named)

    def __iter__(self) -> Any:
        return iter(self._calls.request("list", self._number))


def _number_of(value: Any) -> int:
    if isinstance(value, RemoteObject):
        return vars(value)["_number"]
    raise NotPlain(f"a value of type {type(value).__name__} cannot be passed to the answer")


def _exception(kind: Any, text: Any) -> Exception:
    """Return the exception that the answer raised. One that would end a loop or the judge becomes a RuntimeError."""
    exception_type = getattr(builtins, str(kind), None)
    if (
        isinstance(exception_type, type)
        and issubclass(exception_type, Exception)
        and not issubclass(exception_type, StopIteration | StopAsyncIteration)
    ):
        try:
            return exception_type(str(text))
        except TypeError:
            pass  # the exception takes other arguments
    return RuntimeError(f"{kind}: {text}")


def free_names(program: str, outer_names: Iterable[str]) -> set[str]:
    """Return the names that a program uses and does not define, except outer_names, which are defined elsewhere."""
    module_table = symtable.symtable(program, "tests", "exec")
    defined_names = {
        symbol.get_name()
        for symbol in module_table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    tables, used_names = [module_table], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used_names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and symbol.is_global()}
    return used_names - defined_names - set(outer_names) - set(dir(builtins))


def judge(frames: Frames) -> None:
    """Run the tests in the first frame, {"setup", "program", "entry_point"}, and send a verdict with the key passed or broken.

    The entry point, and names that the tests use and do not define, are functions of the answer.
    """
    task, calls = frames.receive(), RemoteCalls(frames)
    try:
        names: dict[str, Any] = {"__name__": "tests"}
        exec(compile(task["setup"], "setup", "exec"), names)
        answer_names = free_names(task["program"], names) | ({task["entry_point"]} if task["entry_point"] else set())
        names |= {name: calls.function(name) for name in answer_names}
        program = compile(task["program"], "tests", "exec")
    except Exception as error:
        verdict = {"broken": f"cannot load the tests: {error!r}"}
    else:
        try:
            calls.request("load")
            exec(program, names)
            verdict = {"passed": True}
        except BrokenTests as error:
            verdict = {"broken": str(error)}
        except ImportError as error:
            verdict = {"passed": False, "why": repr(error)} if error is calls.last_error else {"broken": repr(error)}
        except BaseException as error:
            verdict = {"passed": False, "why": repr(error)[:1000]}
    frames.send(VERDICT + json.dumps(verdict).encode(errors="replace"))


def main() -> None:
    """Serve or judge, as the first argument says."""
    sys.setrecursionlimit(RECURSION)
    frames = Frames()
    if sys.argv[1] == "judge":
        judge(frames)
    else:
        AnswerServer(frames, bare=sys.argv[2] == "bare").serve()


if __name__ == "__main__":
    main()
