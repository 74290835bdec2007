"""Compare the builds of PyTorch, CUDA and NCCL that ranks of one world use.

The store and gloo do not negotiate versions, so PyTorch's release and CUDA's major release must be equal, and NCCL's version
must be exactly equal. Builds of one release may differ: NVIDIA's is of another commit than PyPI's.

This imports only the standard library, because containers/check_image.py runs it in images that may lack everything else.
"""

from __future__ import annotations

import re

TORCH, CUDA, NCCL = "torch", "CUDA", "NCCL"
MUST_MATCH = {TORCH: r"\d+\.\d+\.\d+", CUDA: r"\d+", NCCL: r".+"}
"""Name -> pattern of the beginning of its version that must be equal on all ranks."""


def inductor_links(torch_file: str) -> bool:
    """Return whether Inductor can link C++ against the PyTorch in this folder: it does not quote paths with blanks."""
    return " " not in torch_file


def common_part(name: str, version: str) -> str:
    """Return the part of a version that all components share: "2.13.0" of torch's "2.13.0+cu130", "13" of CUDA's "13.2".

    A version without such a part, such as "None" for CUDA in a CPU build, is returned unchanged.
    """
    found = re.match(MUST_MATCH[name], version)
    return found[0] if found else version
