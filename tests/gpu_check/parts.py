"""The parts of the check: what each needs, the command that runs it, and how its result is read."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tests.gpu_check.table import FAILED, LEFT_OUT, PASSED, Result

ROOT = Path(__file__).parents[2]
CORE = ("transformers", "omegaconf", "msgspec", "safetensors", "tokenizers", "yaml", "psutil", "numpy")
RUNS = ("submitit", "cloudpickle", "datasets", "torchdata", "tensorboard", "jinja2", "rich", "peft")
TOLD = ("torch", "vllm", "megatron", "transformer_engine", "transformers", "triton")
PACKAGES = {"megatron.core": "megatron-core", "yaml": "pyyaml"}
NONE_COLLECTED = 5  # pytest's status
RESULT = "gpu_check: "  # begins the line of a measurement's numbers


@dataclass(frozen=True)
class Setting:
    device: str
    size: str
    folder: Path  # for files of this check

    @property
    def environment(self) -> dict[str, str]:
        hidden = {} if self.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", **hidden}


@dataclass(frozen=True)
class Part:
    name: str
    needs: tuple[str, ...]  # modules
    command: list[str]
    judge: Callable[[str, int, str], Result]  # (name, status, output) -> result
    run_dir: Path | None = None  # of a run


def every(setting: Setting) -> Iterator[Part]:
    """Yield all parts, in the order in which they run."""
    for area, (needs, *paths) in AREAS.items():
        yield _tests(f"tests: {area}", needs, paths, setting)
    yield from _runs(setting)
    for name in STEPS:
        yield _measurement("train", name, (*STEP_NEEDS[name],), setting)
    for backend in ("vllm", "transformers"):
        yield _measurement("decode", backend, (backend,), setting)
    yield _measurement("refit", "planned", (), setting)


# ---- what is installed ------------------------------------------------------------------------------------------------------


def missing(*modules: str) -> list[str]:
    """Return the packages that are not installed. Nothing is imported but the packages above them."""
    return [name for name in modules if not _there(name)]


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def package(module: str) -> str:
    """Return pip's name of a module."""
    return PACKAGES.get(module, module)


def versions() -> dict[str, str | None]:
    """Return the versions of these modules. None: not installed."""
    owners = metadata.packages_distributions()
    return {module: metadata.version(owners[module][0]) if module in owners else None for module in TOLD}


# ---- tests ------------------------------------------------------------------------------------------------------------------

FSDP2 = ("cuda", "compiled_cuda", "flex_cuda", "kernels", "offload")
AREAS: dict[str, tuple] = {  # area -> modules that its tests import, then files
    "nodes": (("pytest",), "tests/world/test_node_probes.py"),
    "FSDP2": (("pytest", "peft"), *(f"tests/train/test_{name}.py" for name in FSDP2)),
    "Megatron-Core": (("pytest", "megatron.core"), "tests/train/megatron/test_cuda.py"),
    "memory": (("pytest", "megatron.core", "peft"), "tests/launch/plan/test_memory_cuda.py"),
    "vLLM": (("pytest", "vllm"), *(f"tests/generate/test_{name}.py" for name in ("vllm", "in_flight", "fp8"))),
    "monitor": (("pytest", "pynvml"), "tests/monitor/test_gpu.py"),
    "refit": (("pytest",), *(f"tests/refit/test_{name}.py" for name in ("transfer", "shared_memory", "delta", "digest"))),
}


def _tests(name: str, needs: tuple[str, ...], paths: list[str], setting: Setting) -> Part:
    report = setting.folder / "junit.xml"
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    if setting.device == "cpu":
        options.append("--collect-only")
    judge = functools.partial(_judge_tests, report=report)
    return Part(name, needs, [sys.executable, "-m", "pytest", *options, *paths], judge)


def _judge_tests(name: str, status: int, output: str, report: Path) -> Result:
    if status == NONE_COLLECTED:
        return Result(name, LEFT_OUT, "it has no test that needs a GPU")
    if status == 0 and (collected := re.findall(r"^(\d+)(?:/\d+)? tests collected", output, re.M)):
        return Result(name, LEFT_OUT, f"tests that need a GPU: {collected[-1]}")
    if not report.exists():
        return Result(name, FAILED, f"pytest ended with status {status}")
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    total, *ended = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    report.unlink()
    failures, errors, skipped = ended
    note = f"{total - sum(ended)} of {total} tests passed" + (f", {skipped} skipped" if skipped else "")
    if status or failures or errors:
        return Result(name, FAILED, note)
    return Result(name, LEFT_OUT if skipped == total else PASSED, note)


# ---- runs -------------------------------------------------------------------------------------------------------------------


def _runs(setting: Setting) -> Iterator[Part]:
    steps = 20 if setting.size == "full" else 2
    runs = setting.folder / "runs"
    sampled = ("vllm",) if not missing("vllm") else ()
    few = ["grpo.max_val_samples=16", "grpo.val_at_start=false", "policy.train_global_batch_size=16"]
    recipes = {
        "tiny_sft": [f"sft.max_num_steps={steps}", f"checkpointing.save_period={steps}"],
        "tiny_grpo": [
            f"grpo.max_num_steps={steps}",
            f"policy.model_name={runs}/tiny_sft/hf",
            f"policy.generation.backend={'vllm' if sampled else 'transformers'}",
            "needs=[]",
            *(["grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", *few] if setting.size == "tiny" else []),
        ],
    }
    ranks = ["cluster.train.ranks_per_node=1"] if setting.size == "tiny" else []
    for recipe, overrides in recipes.items():
        own = [*ranks, *(["cluster.generate.ranks_per_node=1"] if ranks and recipe == "tiny_grpo" else []), *overrides]
        place = [f"recipe={recipe}", f"run_dir={runs}/{recipe}", "cluster.executor=local"]
        command = [sys.executable, "launch/submit.py", *place, *own]
        yield Part(f"run: {recipe}", RUNS, command, functools.partial(_judge_run, run=runs / recipe), runs / recipe)


def _judge_run(name: str, status: int, output: str, run: Path) -> Result:
    if status or not (run / "done.json").exists():
        return Result(name, FAILED, f"submit.py ended with status {status}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    placed = re.findall(r"this machine has .*?: (.*?); set cluster", output)
    times = [line["time/step"] for line in lines if "time/step" in line]
    return Result(name, PASSED, *placed[:1], numbers={"steps": len(times), "last step, s": times[-1]})


# ---- measurements -----------------------------------------------------------------------------------------------------------

STEPS = {  # of a training step: name -> keys
    "FSDP2": ("policy.dtensor_cfg.enabled=true",),
    "FSDP2, eager": ("policy.dtensor_cfg.enabled=true", "policy.dtensor_cfg.compile=false"),
    "Megatron-Core": ("policy.megatron_cfg.enabled=true",),
}
STEP_NEEDS = {name: ("megatron.core",) if "Megatron" in name else ("peft",) for name in STEPS}


def _measurement(kind: str, name: str, needs: tuple[str, ...], setting: Setting) -> Part:
    command = [sys.executable, "-m", "tests.gpu_check.measure", kind, name, setting.device, setting.size]
    return Part(f"{kind}: {name}", needs, command, _judge_measurement)


def _judge_measurement(name: str, status: int, output: str) -> Result:
    told = [line.removeprefix(RESULT) for line in output.splitlines() if line.startswith(RESULT)]
    if status or not told:
        return Result(name, FAILED, f"it ended with status {status}")
    found = json.loads(told[-1])
    return Result(name, PASSED, found["note"], found["numbers"])
