"""Check an image from inside it: check_image.py train|generate NCCL_VERSION BUILD [OTHER]

Finds what ranks need and the image lacks, or the other image has in another version. Writes its build of PyTorch, with CUDA and
NCCL, to the file BUILD. OTHER is the file that this left in the other image, where that was built first.

Ranks of both images form one world, so their builds must agree as pipeline/node/builds.py says. Where they differ in anything
else, the whole of both is told, for whoever looks for a reason later. Ends with status 1 and what is wrong. Leaves out whether
there are GPUs: an image is built where there are none.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of containers/

from pipeline.node.builds import CUDA, MUST_MATCH, NCCL, TORCH, common_part
from pipeline.recipe.problems import Problem, format_problems

FOLDER = Path(__file__).resolve().parent
RELEASES = {"train": {"transformer_engine": "2.17"}, "generate": {"vllm": "0.32.0"}}
if platform.machine() == "x86_64":
    RELEASES["train"]["flash_attn_3"] = "3.0.0"
"""Packages of the base or of another index, as beginnings of version numbers."""
RANKS_IMPORT = ("launch.executors.rank_task", "pipeline.main")
ALSO = {"train": ("megatron.core",), "generate": ("vllm",)}


def pins(path: Path) -> dict[str, str]:
    """Return name -> version of the lines `name==version`."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def problems(kind: str, nccl: str, folder: Path = FOLDER) -> Iterator[Problem]:
    for name, wanted in pins(folder / kind / "requirements.txt").items():
        if (found := _version(name)) != wanted:
            yield Problem(name, "wrong-version", f"got {found}; requirements.txt has {wanted}")
    release = re.search(r'"torch==([\d.]+)"', (folder.parent / "pyproject.toml").read_text())[1]
    for name, wanted in {"torch": release, **RELEASES[kind]}.items():
        found = _version(name)
        if found is None or not re.match(rf"{re.escape(wanted)}(?!\d)", found):
            yield Problem(name, "wrong-version", f"got {found}; both images are made for {wanted}")
    import torch

    if not torch.backends.cuda.is_built():
        yield Problem("torch", "needs-gpu", f"got {torch.__version__}, which is built without CUDA")
    elif (found := build()[NCCL]) != nccl:
        why = f"got {found}; the other image has {nccl}. Take another base, or the same NCCL_VERSION in both Dockerfiles"
        yield Problem(NCCL, "wrong-version", why)
    yield from kernel_problems(kind)
    for library in ("libibverbs.so.1", "libmlx5.so.1"):
        try:
            ctypes.CDLL(library)
        except OSError as error:
            why = f"{error}; without it NCCL takes sockets. Install rdma-core and ibverbs-providers"
            yield Problem(library, "not-installed", why)
    for module in (*ALSO[kind], *RANKS_IMPORT):
        try:
            importlib.import_module(module)
        except Exception as error:
            yield Problem(module, "not-importable", f"{type(error).__name__}: {error}")


def kernel_problems(kind: str) -> Iterator[Problem]:
    """Yield what ranks lack for their kernels: functions of PyTorch, or what Triton compiles with."""
    from pipeline.node import c_compiler, torch_features

    if kind == "train" and (lacking := torch_features.lacking()):
        yield Problem("torch", "wrong-version", f"has no {', '.join(lacking)}, which train ranks call. Take another base")
    if missing := c_compiler.missing():
        yield Problem("triton", "not-installed", f"cannot compile: there is no {missing}")


def build() -> dict[str, str]:
    """Return this image's PyTorch: version with its local part, commit, CUDA and NCCL."""
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.backends.cuda.is_built() else "none"
    version = torch.version
    return {TORCH: str(torch.__version__), "git": str(version.git_version), CUDA: str(version.cuda), NCCL: nccl}


def differences(own: dict[str, str], other: dict[str, str]) -> tuple[list[Problem], list[str]]:
    """Return (why ranks of two builds cannot form one world, in what else they differ)."""
    wrong = [
        Problem(name, "wrong-version", f"{own[name]} here, {other[name]} in the other image; ranks of both form one world")
        for name in MUST_MATCH
        if common_part(name, own[name]) != common_part(name, other[name])
    ]
    notes = [f"{name}: {own[name]} here, {other[name]} in the other image" for name in own if own[name] != other[name]]
    return wrong, [] if wrong else notes


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main(kind: str, nccl: str, record: str, other: str = "") -> int:
    found, own = list(problems(kind, nccl)), build()
    if other and Path(other).exists():
        wrong, notes = differences(own, json.loads(Path(other).read_text()))
        found += wrong
        print("\n".join(f"note: {note}" for note in notes))
    print(format_problems(found) if found else f"the {kind} image has what its ranks need")
    if not found:
        Path(record).write_text(json.dumps(own) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
