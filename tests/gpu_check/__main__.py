"""Check this machine: python -m tests.gpu_check [NAME=VALUE ...]

    total=SECONDS     how long it may take, 840 by default. A part that does not fit in what is left is left out
    parts=NAME,NAME   only the parts whose names begin so, such as parts=train,decode
    out=FILE          for the results. By default $OUT/gpu_check.json if the variable OUT names a folder, else gpu_check.json
    after=FILE        take the results of an earlier call, and run the parts that had no time in it, or those in `parts`
    size=tiny, device=cpu   for tests of this program: the tests that need a GPU are only collected

The parts come in the order of what they tell. One whose packages or GPUs are missing is left out. The results are written after
each part. On SIGTERM and SIGINT the running part is ended and recorded as cut. README.md says how to read the table at the end.

No network is needed. The status is 0 if no part failed or was cut, 1 if one was, and 2 if there is no GPU or no PyTorch.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

from tests.gpu_check.check import NOTHING_TO_CHECK, Check
from tests.gpu_check.measurement import Place, said
from tests.gpu_check.parts import TORCH, every, missing

OPTIONS = {"total": "840", "parts": "", "out": "", "after": "", "size": "full", "device": "cuda"}


def _problem(options: dict[str, str]) -> str:
    """Return what is wrong with the values of the options; "" if nothing is."""
    for name, choices in (("device", ("cuda", "cpu")), ("size", ("full", "tiny"))):
        if options[name] not in choices:
            return f"{name}: got {options[name]}; expected {' or '.join(choices)}"
    if not re.fullmatch(r"[1-9]\d*", options["total"]):
        return f"total: got {options['total']}; expected a number of seconds"
    if options["out"] and not Path(options["out"]).absolute().parent.is_dir():
        return f"out: got {options['out']}; its folder does not exist"
    try:
        if options["after"]:
            json.loads(Path(options["after"]).read_text())["results"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"after: got {options['after']}; expected the file of an earlier check ({said(error)})"
    return ""


def main(arguments: list[str]) -> int:
    options = dict(OPTIONS)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in OPTIONS or not equals:
            print(f"gpu_check: got {argument}; expected one of {', '.join(f'{each}=...' for each in OPTIONS)}")
            return NOTHING_TO_CHECK
        options[name] = value
    if problem := _problem(options):
        print(f"gpu_check: {problem}")
        return NOTHING_TO_CHECK
    if absent := missing(*TORCH):
        print(f"gpu_check: this Python ({sys.executable}) has no {absent[0]}. Try make setup, or make gpu-check PYTHON=...")
        return NOTHING_TO_CHECK
    with tempfile.TemporaryDirectory(prefix="gpu_check-", ignore_cleanup_errors=True) as folder:
        place = Place(options["device"], options["size"], 0, Path(folder))
        names = [part.name for part in every(place)]
        wanted = tuple(filter(None, options["parts"].split(",")))
        for beginning in wanted:
            if not any(name.startswith(beginning) for name in names):
                print(f"gpu_check: parts: got {beginning}; expected beginnings of {', '.join(names)}")
                return NOTHING_TO_CHECK
        return Check(place, options).run(wanted or ("",))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
