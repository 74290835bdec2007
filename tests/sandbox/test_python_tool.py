import os
import signal
import time
from pathlib import Path

import pytest

from pipeline.environments.python_tool import PythonTool
from pipeline.environments.tool import ToolError
from pipeline.environments.tools import ToolConfig, build_tool
from pipeline.sandbox import processes
from pipeline.sandbox.limits import SandboxError
from tests.sandbox.conftest import unusable
from tests.sandbox.hosts import until

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def tool() -> PythonTool:
    if reason := unusable():
        pytest.skip(reason)
    return build_tool(ToolConfig("python", {"wall_s": 20.0, "memory_bytes": 128 << 20, "output_bytes": 1000}))


def test_names_persist_and_sessions_are_separate(tool: PythonTool):
    one, other = tool.open(), tool.open()
    assert one.call({"code": "x = 6"}, TIMEOUT_S) == ""
    assert one.call({"code": "print('so'); x * 7"}, TIMEOUT_S) == "so\n42"
    assert one.call({"code": "def f(n):\n    return n\nprint(f(1))"}, TIMEOUT_S) == "1\n"
    assert one.call({"code": "open('left', 'w').write('x')"}, TIMEOUT_S) == "1"
    with pytest.raises(ToolError, match="line 1: NameError: name 'x' is not defined"):
        other.call({"code": "x"}, TIMEOUT_S)
    with pytest.raises(ToolError, match="FileNotFoundError"):
        other.call({"code": "open('left')"}, TIMEOUT_S)
    one.close()
    one.close()
    other.close()


def test_an_exception_is_returned_with_the_output(tool: PythonTool):
    session = tool.open()
    with pytest.raises(ToolError, match=r"^so far\nline 2: ZeroDivisionError: division by zero$"):
        session.call({"code": "print('so far')\n1 / 0"}, TIMEOUT_S)
    with pytest.raises(ToolError, match="SyntaxError"):
        session.call({"code": "if"}, TIMEOUT_S)
    with pytest.raises(ToolError, match="SystemExit"):
        session.call({"code": "raise SystemExit"}, TIMEOUT_S)
    assert 990 < len(session.call({"code": "print('x' * 10**6)"}, TIMEOUT_S)) <= 1000
    session.close()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os._exit(0)", "the interpreter ended; all names"),
        (
            "import os, time\nfor _ in range(20):\n    os.fork() or time.sleep(60)\ntime.sleep(60)",
            r"the interpreter ended \((processes|memory)\); all names",
        ),
        (
            "import os\nfor n in range(3, 30):\n    try: os.write(n, b'xxxxxxxx' * 99)\n    except OSError: pass\nos._exit(0)",
            "all names",
        ),
    ],
)
def test_a_lost_interpreter_is_reported_and_replaced(tool: PythonTool, code: str, error: str):
    session = tool.open()
    session.call({"code": "x = 1"}, TIMEOUT_S)
    with pytest.raises(ToolError, match=error):
        session.call({"code": code}, TIMEOUT_S)
    with pytest.raises(ToolError, match="NameError"):
        session.call({"code": "x"}, TIMEOUT_S)
    session.close()


def test_code_that_does_not_end(tool: PythonTool):
    session = tool.open()
    session.call({"code": "x = 1"}, TIMEOUT_S)
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        session.call({"code": "while True: pass"}, 0.2)
    assert session.call({"code": "2"}, TIMEOUT_S) == "2"
    session.close()


def test_a_dropped_session_leaves_nothing(tool: PythonTool):
    """Dropping it does not wait for its end: here the guard cannot end."""
    session = tool.open()
    session.call({"code": "1"}, TIMEOUT_S)
    guard = session._program._process.pid
    inside = processes.descendants(guard)
    os.kill(guard, signal.SIGSTOP)
    del session
    assert inside == processes.descendants(guard)
    os.kill(guard, signal.SIGCONT)
    until(lambda: (not processes.descendants(guard) and not os.path.exists(f"/proc/{guard}")) or None)


def test_many_sessions_need_few_descriptors(tool: PythonTool):
    before = len(os.listdir("/proc/self/fd"))
    sessions = [tool.open() for _ in range(2)]
    for session in sessions:
        session.call({"code": "1"}, TIMEOUT_S)
    assert len(os.listdir("/proc/self/fd")) - before == 4 * len(sessions)
    for session in sessions:
        session.close()
    assert len(os.listdir("/proc/self/fd")) == before


FORGE = """
import json, os, struct
forged = json.dumps({"printed": "x" * 20_000, "value": None, "error": None}).encode()
for descriptor in range(3, 16):  # 4 or so is the interpreter's own copy of where it answers
    try:
        while True:
            os.write(descriptor, ANSWER)
    except OSError:
        pass
"""


FORGED = [
    "struct.pack('<iii', 100_000, -1, -1) + b'x' * 100_000",
    "struct.pack('<iii', 600, 401, -1) + b'x' * 1001",
    "struct.pack('<iii', -1, -1, -1)",
    "struct.pack('<iii', 5, -2, -1) + b'x' * 9",
    "struct.pack('<iii', 2**31 - 1, -2**31, -1) + b'x' * 9",
    "struct.pack('<I', 100_000) + b'[' * 100_000",
    "struct.pack('<I', len(forged)) + forged",
]


@pytest.mark.parametrize(
    "answer", [*FORGED[:2], FORGED[-1], *(pytest.param(one, marks=pytest.mark.full) for one in FORGED[2:-1])]
)
def test_a_forged_answer_is_reported(tool: PythonTool, answer: str):
    session = tool.open()
    with pytest.raises(ToolError, match="the interpreter ended"):
        session.call({"code": FORGE.replace("ANSWER", answer)}, TIMEOUT_S)
    assert session.call({"code": "1 + 1"}, TIMEOUT_S) == "2"
    session.close()


def test_an_endless_answer_is_read_until_its_timeout(tool: PythonTool):
    """The clock is checked even if data is always available."""
    program = tool._sandbox.start([tool._sandbox.python, "-c", "import os\nwhile True: os.write(1, b'x' * 512)"])
    program.receive(1, time.monotonic() + TIMEOUT_S)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        program.receive(1 << 34, begun + 0.5)
    assert time.monotonic() - begun < 20
    program.close()


def test_a_question_that_is_read_slowly_is_sent_until_its_timeout(tool: PythonTool):
    program = tool._sandbox.start([tool._sandbox.python, "-c", "import os, time\nwhile os.read(0, 4096): time.sleep(0.001)"])
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        program.send(bytes(1 << 28), begun + 0.5)
    assert time.monotonic() - begun < 20
    program.close()


def test_the_result_of_a_call_is_limited(tool: PythonTool):
    """The limit is in bytes, whatever the characters' length; output is truncated before a value or an error."""
    session = tool.open()
    for code in ("print('é' * 10**4); 'é' * 10**4", "print('\\0' * 10**4)", "print('x' * 10**4); '\\U0001F600' * 10**4"):
        executed = session.execute(code, TIMEOUT_S)
        assert 990 < len((executed.printed + (executed.value or "")).encode()) <= 1000
    executed = session.execute("print('x' * 10**4)\nraise ValueError('why')", TIMEOUT_S)
    assert executed.error == "line 2: ValueError: why" and len(executed.printed + executed.error) == 1000
    assert session.execute("print('\\ud800')", TIMEOUT_S).printed == "?\n"  # not a character, and not part of a policy's text
    session.close()


@pytest.mark.full
def test_an_interpreter_has_a_wall_time_between_calls_too():
    tool = build_tool(ToolConfig("python", {"session_s": 1.0}))
    session = tool.open()
    assert session.call({"code": "x = 1\nx"}, TIMEOUT_S) == "1"
    program = session._program._process.pid
    until(lambda: not processes.descendants(program) or None)
    with pytest.raises(ToolError, match=r"the interpreter ended \(wall time\); all names are gone"):
        session.call({"code": "x"}, TIMEOUT_S)
    session.close()


def test_a_sandbox_failure_is_not_the_codes_fault(tmp_path: Path):
    if reason := unusable():
        pytest.skip(reason)
    folder = tmp_path / "readable"
    folder.mkdir()
    session = build_tool(ToolConfig("python", {"readable": [str(folder)]})).open()
    folder.rmdir()
    with pytest.raises(SandboxError, match="sandbox: "):
        session.call({"code": "1"}, TIMEOUT_S)
