"""A build of PyTorch is asked for what train ranks call: supported ones lack nothing, and what others lack is named."""

import sys

import pytest
import torch
from torch.nn.attention import varlen

from pipeline.node import torch_features
from tests import torch_builds


def unused(*_, **__):
    raise AssertionError("only the signature counts")


@pytest.fixture(params=[*torch_builds.BUILDS, "no windows"])
def name(request, monkeypatch):
    """Let torch be the build of this name."""
    build = torch_builds.BUILDS.get(request.param, torch_builds.NO_WINDOWS)
    monkeypatch.setattr(varlen, "varlen_attn", torch_builds.function(build, unused))
    with torch_builds.operators(build, unused, unused) as operators:
        monkeypatch.setattr(torch.ops, "torch_attn", operators)
        yield request.param


def test_this_build_lacks_nothing():
    assert torch_features.lacking() == []


def test_what_builds_lack(name):
    assert torch_features.lacking() == (
        []
        if name != "no windows"
        else [
            "torch.nn.attention.varlen.varlen_attn (got an unexpected keyword argument 'scale')",
            "torch.ops.torch_attn._varlen_attn (got an unexpected keyword argument 'scale')",
            "torch.ops.torch_attn._varlen_attn_backward (got an unexpected keyword argument 'scale')",
        ]
    )
    assert torch_features.takes(varlen.varlen_attn, "enable_gqa") == (name == "2.12 and 2.13")


def test_what_is_absent_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    monkeypatch.setattr(torch, "ops", object())
    monkeypatch.delattr(torch.distributed.fsdp.FSDPModule, "set_force_sum_reduction_for_comms")
    assert torch_features.lacking() == [
        "torch.nn.attention.varlen.varlen_attn",
        "torch.ops.torch_attn._varlen_attn",
        "torch.ops.torch_attn._varlen_attn_backward",
        "torch.distributed.fsdp.FSDPModule.set_force_sum_reduction_for_comms",
    ]


def test_a_required_argument_that_ranks_do_not_pass_is_named(monkeypatch):
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda impl, device: None)
    assert torch_features.lacking() == [
        "torch.nn.attention.activate_flash_attention_impl (missing a required argument: 'device')"
    ]
