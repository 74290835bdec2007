"""The matrices of a model that Muon updates.

A matrix is what a linear layer, a router or an adapter stores on disk. A stack of experts in one parameter is one matrix per
expert and layer, so `gate_up_proj` is two matrices if the files have `gate_proj` and `up_proj`. Embeddings, heads,
convolutions, norms, biases and other vectors are AdamW's.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from pipeline.boxes import Box, Piece, whole
from pipeline.models.family import SCORE
from pipeline.train.adapters.adapted_experts import expert_parameters
from pipeline.train.muon import Matrix


def find_matrices(
    hf: PreTrainedModel, trained: Mapping[str, nn.Parameter], layout: Mapping[str, Sequence[Piece]]
) -> dict[nn.Parameter, list[Matrix]]:
    """Return the matrices of each trained parameter that Muon updates.

    trained: {name: parameter} of `hf`. layout: {name: its pieces of tensors on disk}.
    """
    experts, matrices = expert_parameters(hf), {}
    heads = [module for module in (hf.get_input_embeddings(), hf.get_output_embeddings()) if module is not None]
    for name, parameter in trained.items():
        path, _, leaf = name.rpartition(".")
        owner = hf.get_submodule(path)
        if name == SCORE or owner in heads or isinstance(owner, nn.Embedding | _ConvNd):
            continue
        if parameter.dim() == 3 or (parameter.dim() == 2 and leaf == "weight"):  # others: biases of experts, A of state spaces
            transposed = name in experts and experts[name].transposed and not leaf.startswith("lora_")
            matrices[parameter] = [
                Matrix(box, transposed) for box in _boxes(whole(tuple(parameter.shape)), layout.get(name, ()))
            ]
    return matrices


def _boxes(of: Box, pieces: Iterable[Piece]) -> list[Box]:
    """Return the boxes of matrices in a parameter: of its tensors on disk, if it consists of whole ones, cut by experts."""
    names = Counter(piece.name for piece in pieces)
    parts = [piece.target for piece in pieces] if names and max(names.values()) == 1 else [of]
    return [
        Box((*map(operator.add, part.offset, index), *part.offset[-2:]), (*(1 for _ in index), *part.size[-2:]))
        for part in parts
        for index in itertools.product(*map(range, part.size[:-2]))
    ]
