"""The tests that need a GPU, by area: pytest's command, and its report."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from tests.gpu_check.measurement import Place
from tests.gpu_check.table import FAILED, LEFT_OUT, PASSED, Result

NONE_COLLECTED = 5  # pytest's status


@dataclass(frozen=True)
class Area:
    files: tuple[str, ...]
    chosen: str = ""  # pytest's -k
    timeout_s: int = 60  # of one test, where pytest-timeout is installed


AREAS = {
    "vLLM": Area(tuple(f"tests/generate/test_{name}.py" for name in ("vllm", "in_flight", "fp8")), timeout_s=180),
    "compiled bfloat16": Area(("tests/train/test_compiled_cuda.py",), "not float32", 120),
    "compiled float32": Area(("tests/train/test_compiled_cuda.py",), "float32", 120),
    "memory": Area(("tests/launch/plan/test_memory_cuda.py",)),
    "refit": Area(tuple(f"tests/refit/test_{name}.py" for name in ("transfer", "shared_memory", "delta", "digest"))),
    "node and monitor": Area(("tests/world/test_node_probes.py", "tests/monitor/test_gpu.py")),
    "FSDP2": Area(tuple(f"tests/train/test_{name}.py" for name in ("cuda", "flex_cuda", "kernels", "offload"))),
    "Megatron-Core": Area(("tests/train/megatron/test_cuda.py",)),
}


def command(area: Area, place: Place, timeout: bool) -> list[str]:
    """Return pytest's command. On the CPU the tests are only collected. timeout: whether pytest-timeout is installed."""
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={_report(place)}"]
    options += ["-k", area.chosen] if area.chosen else []
    options += [f"--timeout={area.timeout_s}"] if timeout else []
    options += ["--collect-only"] if place.device == "cpu" else []
    return [sys.executable, "-m", "pytest", *options, *area.files]


def judge(name: str, status: int, output: str, place: Place) -> Result:
    """Read pytest's report."""
    if status == NONE_COLLECTED:
        return Result(name, LEFT_OUT, "it has no test that needs a GPU")
    if status == 0 and (collected := re.findall(r"^(\d+)(?:/\d+)? tests collected", output, re.M)):
        return Result(name, LEFT_OUT, f"tests that need a GPU: {collected[-1]}")
    report = _report(place)
    if not report.exists():
        return Result(name, FAILED, f"pytest ended with status {status}")
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    report.unlink()
    total, *ended = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    failures, errors, skipped = ended
    note = f"{total - sum(ended)} of {total} tests passed" + (f", {skipped} skipped" if skipped else "")
    tests = {test.get("name", ""): test for test in suite.iter("testcase")}
    wrong = [test for test, report in tests.items() if {"failure", "error"} & {each.tag for each in report}]
    note += f"; failed: {', '.join(wrong)}" if wrong else ""
    recorded = {
        test: {each.get("name"): each.get("value") for each in report.iter("property")} for test, report in tests.items()
    }
    details = {test: properties for test, properties in recorded.items() if properties}
    if status or failures or errors:
        return Result(name, FAILED, note, details=details)
    return Result(name, LEFT_OUT if skipped == total else PASSED, note, details=details)


def _report(place: Place) -> Path:
    return place.folder / "junit.xml"
