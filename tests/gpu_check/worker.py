"""Measure one part after another in one process: python -m tests.gpu_check.worker DEVICE SIZE FOLDER

Each line of its input is [number of GPUs, *call], with a call as in `parts.Part`; each line of its output a Measurement.
Everything that it and its libraries print goes to its standard error.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from tests.gpu_check.measurement import Measurement, Place, said


def main(device: str, size: str, folder: str) -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            gpus, module, function, *arguments = json.loads(line)
            place, failed = Place(device, size, gpus, Path(folder)), False
            try:
                measured = getattr(importlib.import_module(f"tests.gpu_check.{module}"), function)(place, *arguments)
                answer = json.dumps(asdict(measured))
                _clean()
            except Exception as error:
                traceback.print_exc()
                answer, failed = json.dumps(asdict(Measurement(problems=[said(error)]))), True
            print(answer, file=answers, flush=True)
            if failed:
                return


def _clean() -> None:
    """Leave nothing of a part to the next one: groups, graphs, memory."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    groups = sys.modules.get("megatron.core.parallel_state")
    if groups is not None and groups.model_parallel_is_initialized():
        from tests.train.megatron import layouts

        layouts.release()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
