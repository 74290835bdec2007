"""Check that Megatron-Core on the CPU fails with a clear error when a replacement no longer applies."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from pipeline.train.megatron import cpu

MARKS = {  # in the lines of each module without which a rewriting cannot be done
    "megatron.core.jit": re.compile("nvFuser"),
    "megatron.core.transformer.moe.token_dispatcher": re.compile("d2h_event.synchronize"),
    "megatron.core.transformer.moe.moe_utils": re.compile("record_stream"),
    "megatron.core.tensor_parallel.random": re.compile("_cuda_setRNGState"),
}


@pytest.mark.parametrize("module", cpu._IN_MODULE)
def test_a_changed_source_is_an_error(module, tmp_path):
    path = tmp_path / "source.py"
    source = Path(importlib.util.find_spec(module).origin).read_text()
    path.write_text(source)
    cpu._RewritingLoader(module, str(path)).get_code(module)
    path.write_text("\n".join(line for line in source.splitlines() if not MARKS[module].search(line)))
    with pytest.raises(ImportError, match=f"{module} no longer has .* was written for Megatron-Core 0.16.1"):
        cpu._RewritingLoader(module, str(path)).get_code(module)


def test_the_replacement_must_precede_megatrons_import(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, cpu._Finder)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ImportError, match=r"megatron\.core was imported before"):
        cpu.enable()


def test_the_replacement_runs_once(monkeypatch):
    before = list(sys.meta_path)
    assert sum(isinstance(finder, cpu._Finder) for finder in before) == 1
    cpu.enable()
    assert sys.meta_path == before


def test_nothing_is_replaced_with_cuda(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, cpu._Finder)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = list(sys.meta_path)
    cpu.enable()
    assert sys.meta_path == before
