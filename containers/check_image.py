"""Inside an image:  check_image.py train|generate NCCL_VERSION.  Whether it holds what ranks need, and fits the other image.

Ranks of both images form one world: PyTorch's release must be the same, because its store and gloo have no versions of their
own to agree upon, and so must NCCL's, whose ranks must all be of one version. Ends with status 1 and what is wrong.
Leaves out whether there are GPUs: an image is built where there are none.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OF_THE_BASE = {"train": {"transformer_engine": "2.17"}, "generate": {"vllm": "0.32.0"}}
"""Releases, of which a version is the beginning."""
RANKS_IMPORT = ("launch.task", "pipeline.main")
ALSO = {"train": ("megatron.core",), "generate": ("vllm",)}


def pins(path: Path) -> dict[str, str]:
    """Name -> version, of lines `name==version`."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def problems(kind: str, nccl: str, folder: Path = FOLDER) -> Iterator[str]:
    for name, wanted in pins(folder / kind / "requirements.txt").items():
        if (found := _version(name)) != wanted:
            yield f"{name}: {found}, but requirements.txt has {wanted}"
    release = re.search(r'"torch==([\d.]+)"', (folder.parent / "pyproject.toml").read_text())[1]
    for name, wanted in {"torch": release, **OF_THE_BASE[kind]}.items():
        found = _version(name)
        if found is None or not re.match(rf"{re.escape(wanted)}(?!\d)", found):
            yield f"{name}: {found}, but {wanted} is what both images are made for"
    import torch

    if not torch.backends.cuda.is_built():
        yield f"torch: {torch.__version__} is built without CUDA"
    elif (found := ".".join(map(str, torch.cuda.nccl.version()))) != nccl:
        yield f"NCCL: {found}, but {nccl} is the other image's; another base, or the same NCCL_VERSION in both Dockerfiles"
    sys.path.insert(0, str(folder.parent))
    for module in (*ALSO[kind], *RANKS_IMPORT):
        try:
            importlib.import_module(module)
        except Exception as error:
            yield f"import {module}: {type(error).__name__}: {error}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    found = list(problems(*sys.argv[1:]))
    print("\n".join(found) or f"the {sys.argv[1]} image has what its ranks need")
    sys.exit(1 if found else 0)
