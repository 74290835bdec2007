"""Check that a machine has what torch's compiler Inductor needs, for compiled layers and for flex attention."""

from __future__ import annotations

import os
import shutil

import torch

from pipeline import builds

GCC = "C compiler (gcc, clang or CC)"
GXX = "C++ compiler (g++ or CXX)"
TRITON = "triton that supports this GPU"
PATH = "PyTorch in a folder whose path has no spaces"
NEEDS = (GCC, GXX, TRITON, PATH)  # Inductor's dependencies, for any device


def missing_dependency(device: torch.device) -> str | None:
    """Return the entry of NEEDS that Inductor lacks on this machine for this type of device; None if it lacks none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cuda":
        if not has_triton():
            return TRITON
        # The same search as in triton/runtime/build.py.
        return None if "CC" in os.environ or shutil.which("gcc") or shutil.which("clang") else GCC
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return GXX
    return None if builds.inductor_links(torch.__file__) else PATH
