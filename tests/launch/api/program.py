"""Run a program that imports hetstep from this checkout, as a user's program does."""

import os
import subprocess
import sys
from pathlib import Path

from launch.executors.executor import ROOT

HEAVY = ("torch", "transformers", "vllm", "megatron", "datasets", "tensorboard")


def run(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, without the libraries of the job."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "launch/api")])}
    text = f"import sys\nsys.modules |= dict.fromkeys({HEAVY})\n{program}"
    return subprocess.run([sys.executable, "-c", text], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
