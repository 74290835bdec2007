"""An interpreter that needs LD_LIBRARY_PATH to find a library, as in some images.

Here it is a program linked with that library, which then executes this Python.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.sandbox import file_system, library_path, sandbox
from pipeline.sandbox.limits import GuardError, ResourceLimits, SandboxError
from pipeline.sandbox.sandbox import Sandbox
from tests.sandbox.conftest import unusable

PYTHON = file_system.python()
LIBRARY = "int needed(void) { return 0; }"
PROGRAM = '#include <unistd.h>\nint needed(void);\nint main(int c, char **v) {{ return needed() || execv(v[0] = "{}", v); }}'
ENVIRONMENT = b"import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Return bin/python and lib/libneeded.so, in a folder visible in the sandbox: not /tmp, which is the program's own."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here")
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="hetstep-linked-") as name:
        made = Path(name)
        made.chmod(0o755)
        for part in ("bin", "lib", "other"):
            (made / part).mkdir()
        compiled = {"lib/libneeded.so": LIBRARY, "bin/python": PROGRAM.format(PYTHON)}
        for to, source in compiled.items():
            options = ["-shared", "-fPIC"] if to.endswith(".so") else []
            command = ["gcc", "-x", "c", "-", "-o", str(made / to), *options]
            linking = [] if options else ["-L", str(made / "lib"), "-lneeded"]
            subprocess.run([*command, *linking], input=source.encode(), check=True)
        yield made


@pytest.fixture
def interpreter(folder, monkeypatch) -> Iterator[str]:
    """Use it in place of this process's interpreter."""
    monkeypatch.setattr(sys, "executable", str(folder / "bin/python"))
    monkeypatch.setenv("SECRET_OF_THE_RANK", "hidden")
    sandbox._first_working.cache_clear()
    yield str(folder / "bin/python")
    sandbox._first_working.cache_clear()


@pytest.fixture
def contained() -> None:
    if reason := unusable():
        pytest.skip(reason)


def test_it_runs_in_the_sandbox_and_nothing_else_becomes_visible(contained, interpreter, folder, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{folder / 'other'}:relative::{folder / 'lib'}/")
    ran = Sandbox(ResourceLimits(), readable=(str(folder / "bin"),)).run([interpreter, "main.py"], {"main.py": ENVIRONMENT})
    assert ran.status == 0, ran.stderr
    assert json.loads(ran.stdout) == file_system.ENVIRONMENT | {"LD_LIBRARY_PATH": str(folder / "lib"), "PWD": "/tmp"}


def test_without_the_variable_the_guard_fails_and_bubblewrap_is_not_blamed(interpreter, monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    with pytest.raises(GuardError) as caught:
        sandbox.choose("auto")
    assert f"the guard, {interpreter}, ended with status 127" in str(caught.value)
    assert "libneeded.so: cannot open shared object file" in str(caught.value) and "bubblewrap" not in str(caught.value)


def test_a_library_that_is_not_visible_is_named(contained, interpreter, folder, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder / "lib"))
    monkeypatch.setattr(sandbox, "library_folders", lambda _: [])
    with pytest.raises(SandboxError, match=r"does not find its libraries in the sandbox\. Try to add their folder"):
        sandbox.choose("auto", (str(folder / "bin"),))


def test_only_folders_of_the_interpreter_s_libraries_count(folder, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{folder / 'other'}:{folder / 'lib'}")
    assert library_path.library_folders(str(folder / "bin/python")) == [str(folder / "lib")]
    assert library_path.library_folders("/usr/bin/env") == []
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    assert library_path.library_folders(str(folder / "bin/python")) == []
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder / "lib"))
    with pytest.raises(SandboxError, match="cannot be listed"):
        library_path.library_folders(str(folder / "nothing"))
