"""Check that a machine has what torch's compiler Inductor needs, for compiled layers and for flex attention."""

from __future__ import annotations

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils._triton import has_triton

from pipeline.node import builds, c_compiler

GXX = "C++ compiler (g++ or CXX)"
TRITON = "triton that supports this GPU"
PATH = "PyTorch in a folder whose path has no spaces"
NEEDS = (c_compiler.COMPILER, c_compiler.HEADER, GXX, TRITON, PATH)  # Inductor's dependencies, for any device


def missing_dependency(device: torch.device) -> str | None:
    """Return the entry of NEEDS that Inductor lacks on this machine for this type of device; None if it lacks none."""
    if device.type == "cuda":
        return c_compiler.missing() if has_triton() else TRITON
    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        return GXX
    if not c_compiler.has_header(compiler, "c++"):
        return c_compiler.HEADER
    return None if builds.inductor_links(torch.__file__) else PATH
