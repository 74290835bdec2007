"""Says what builds of PyTorch, CUDA and NCCL must have in common for their ranks to form one world.

The store and gloo have no versions of their own to agree upon, so PyTorch's release must be the same, and CUDA's major release;
NCCL must be of one version. Builds of one release may differ: NVIDIA's is of another commit than PyPI's.

This imports only the standard library: containers/check_image.py needs it in images that may lack everything else.
"""

from __future__ import annotations

import re

TORCH, CUDA, NCCL = "torch", "CUDA", "NCCL"
MUST_MATCH = {TORCH: r"\d+\.\d+\.\d+", CUDA: r"\d+", NCCL: r".+"}
"""The part of each version that must be the same: where it begins, the version begins."""


def inductor_links(torch_file: str) -> bool:
    """Return whether Inductor can link C++ against the PyTorch whose module is this file: it does not quote its folder."""
    return " " not in torch_file


def common_part(name: str, version: str) -> str:
    """Return the part of a version that all components must have: "2.13.0" of torch's "2.13.0+cu130", "13" of CUDA's "13.2".

    A version that has no such part, such as "None" for CUDA in a build for CPUs, is returned as it is.
    """
    found = re.match(MUST_MATCH[name], version)
    return found[0] if found else version
