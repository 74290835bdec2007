"""Run Megatron-Core on the CPU: an import hook replaces `torch.cuda` in its sources by `torch.cpu`.

Megatron-Core uses CUDA's streams, events, generators and current device in many places, although no computation needs them. The
hook rewrites these uses in modules of `megatron.core` when they are imported, and leaves torch unchanged. So the same layouts,
schedules and collectives run here over gloo as on GPUs over NCCL. With CUDA the hook is not installed. If the source text of a
replacement is missing (another version of Megatron-Core), the import raises ImportError.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from types import CodeType

import torch
from typing_extensions import override

PACKAGE = "megatron.core"

# In all modules: (pattern, replacement). torch.cpu has the same stream and device functions as torch.cuda.
_EVERYWHERE = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"device_ids=\[torch\.cuda\.current_device\(\)\]", "device_ids=None"),
        (r"\.cuda\((?:torch\.cuda\.current_device\(\)|non_blocking=True)?\)", ".cpu()"),
        (
            r"torch\.cuda\.(current_device|synchronize|current_stream|stream|Stream|Event|set_device|device_count)\b",
            r"torch.cpu.\1",
        ),
        (r"torch\.cuda\.default_stream\b", "torch.cpu.current_stream"),
        (r"torch\.cuda\.(?:random\.)?(get_rng_state|manual_seed)\b", r"torch.\1"),
        (r"torch\.get_rng_state\(device=device\)", "torch.get_rng_state()"),
        (r"(device(?:_type)?=|torch\.device\(|torch\.autocast\(|init_data\()(['\"])cuda\2", r"\1\2cpu\2"),
        (r"(['\"])torch\.cuda\.(Float|Half|BFloat16)Tensor", r"\1torch.\2Tensor"),
        (r", pin_memory=True", ""),
        # Compiling for the CPU takes a minute and needs a C++ compiler at run time.
        (r"\bjit_fuser = torch\.(compile|jit\.script)", "jit_fuser = noop_decorator"),
    )
]

# In one module: (text, replacement).
_IN_MODULE = {
    "megatron.core.jit": [("jit_fuser = noop_decorator\n# nv", "jit_fuser = None\n# nv")],
    "megatron.core.transformer.moe.token_dispatcher": [("self.d2h_event.synchronize()", "pass")],
    "megatron.core.transformer.moe.moe_utils": [
        ("if torch.is_tensor(tensor) and tensor.is_cuda:", "if torch.is_tensor(tensor):"),
        ("tensor.record_stream(torch.cpu.current_stream())", "pass"),
    ],
    "megatron.core.tensor_parallel.random": [
        (
            "if hasattr(_C, '_cuda_setRNGState') and callable(_C._cuda_setRNGState):",
            "torch.set_rng_state(new_state); return\n    if False:",
        )
    ],
}


def enable() -> None:
    """Install the import hook, unless CUDA is available. Call it before the first import of megatron.core."""
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if any(name.startswith(PACKAGE) for name in sys.modules):
        raise ImportError(f"{PACKAGE} was imported before pipeline.train.megatron.cpu.enable()")
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    @override
    def find_spec(self, name, path=None, target=None):
        if not name.startswith(PACKAGE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _RewritingLoader(spec.loader.name, spec.loader.path)
        return spec


class _RewritingLoader(importlib.machinery.SourceFileLoader):
    @override
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        for pattern, replacement in _EVERYWHERE:
            source = pattern.sub(replacement, source)
        for text, replacement in _IN_MODULE.get(fullname, ()):
            if text not in source:
                patches = "pipeline/train/megatron/cpu.py was written for Megatron-Core 0.16.1"
                raise ImportError(f"{fullname} no longer has {text!r}; {patches}")
            source = source.replace(text, replacement)
        return compile(source, path, "exec", dont_inherit=True)
