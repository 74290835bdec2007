import os
import signal

import pytest

from pipeline.config import ToolArguments
from pipeline.environments.python_tool import PythonTool
from pipeline.environments.registry import build_tool
from pipeline.environments.tool import ToolError
from pipeline.sandbox import processes
from tests.sandbox.conftest import works
from tests.sandbox.hosts import until

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def tool() -> PythonTool:
    if reason := works("auto"):
        pytest.skip(reason)
    return build_tool(ToolArguments("python", {"wall_s": 20.0, "memory_bytes": 128 << 20, "output_bytes": 1000}))


def test_names_stay_and_sessions_are_apart(tool: PythonTool):
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


def test_what_the_code_raises_is_told_with_what_it_printed(tool: PythonTool):
    session = tool.open()
    with pytest.raises(ToolError, match=r"^so far\nline 2: ZeroDivisionError: division by zero$"):
        session.call({"code": "print('so far')\n1 / 0"}, TIMEOUT_S)
    with pytest.raises(ToolError, match="SyntaxError"):
        session.call({"code": "if"}, TIMEOUT_S)
    with pytest.raises(ToolError, match="SystemExit"):
        session.call({"code": "raise SystemExit"}, TIMEOUT_S)
    assert len(session.call({"code": "print('x' * 10**6)"}, TIMEOUT_S)) == 1000
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
def test_an_interpreter_that_is_lost_is_told_and_replaced(tool: PythonTool, code: str, error: str):
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


def test_a_session_that_is_forgotten_leaves_nothing(tool: PythonTool):
    """And whoever forgets it does not wait for that: here a guard that cannot end."""
    session = tool.open()
    session.call({"code": "1"}, TIMEOUT_S)
    guard = session._program._process.pid
    inside = processes.below(guard)
    os.kill(guard, signal.SIGSTOP)
    del session
    assert inside == processes.below(guard)
    os.kill(guard, signal.SIGCONT)
    until(lambda: (not processes.below(guard) and not os.path.exists(f"/proc/{guard}")) or None)


def test_many_sessions_need_few_descriptors(tool: PythonTool):
    before = len(os.listdir("/proc/self/fd"))
    sessions = [tool.open() for _ in range(2)]
    for session in sessions:
        session.call({"code": "1"}, TIMEOUT_S)
    assert len(os.listdir("/proc/self/fd")) - before == 4 * len(sessions)
    for session in sessions:
        session.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_limits_that_are_none():
    with pytest.raises(ValueError, match="memory_bytes"):
        build_tool(ToolArguments("python", {"memory_bytes": -1}))


def test_a_forged_answer_that_is_nested_too_deeply_is_told(tool: PythonTool):
    """Descriptor 4 or so is the interpreter's own copy of where it answers."""
    session = tool.open()
    forge = (
        "import os, struct\nanswer = b'[' * 100_000\n"
        "for descriptor in range(3, 16):\n"
        "    try:\n        os.write(descriptor, struct.pack('<I', len(answer)) + answer)\n"
        "    except OSError:\n        pass\n"
    )
    with pytest.raises(ToolError, match="the interpreter ended"):
        session.call({"code": forge}, 60.0)
    assert session.call({"code": "1 + 1"}, 60.0) == "2"
    session.close()
