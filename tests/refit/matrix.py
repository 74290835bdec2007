"""Real refits between every pair of layouts: four train ranks, four generate ranks with real vLLM, real backends, one world.

For each pair: the reference broadcast first,
then other weights into the engines, then the planned refit. Every region that it wrote must hold the checkpoint's values, bit
by bit; the engine's weights and outputs, log-probs included, must equal those after the broadcast; each rank must have received
exactly what it owns; and greedy completions must be those of a fresh vLLM that loads the checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pipeline.boxes import whole
from pipeline.config import GenerationConfig, PolicyConfig, RefitConfig, TokenizerConfig, VLLMConfig, engine_ranks
from pipeline.config.cluster import NetworkConfig
from pipeline.refit.broadcast import BroadcastRefit
from pipeline.refit.digest import compare
from pipeline.refit.plan import schedule
from pipeline.refit.planned import PlannedRefit
from pipeline.refit.tables import layout_table
from pipeline.types import Request, Sampling
from tests import fork_server
from tests.generate.tiny import drain

TRAIN_RANKS, GENERATE_RANKS = 4, 4
BUCKET_BYTES = 40_000  # many rounds
MAX_TOKENS = 12
PROMPTS = [list(range(2 + k, 5 + 3 * k)) for k in range(8)]
SHAPE = {
    "vocab_size": 61,  # padded by vLLM, and by Megatron-Core under tensor parallelism
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2}
GEMMA4 = {
    **SHAPE,
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, head_dim=32),
    "qwen2": Qwen2Config(**{**SHAPE, "hidden_size": 128}),  # its heads are hidden_size / 4
    "qwen3_tied": Qwen3Config(**{**SHAPE, "tie_word_embeddings": True}, head_dim=32),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=32, num_experts=4, moe_intermediate_size=64, norm_topk_prob=True),
    "mixtral": MixtralConfig(**SHAPE, **EXPERTS, head_dim=32, num_local_experts=4),
    "gemma4_moe": Gemma4TextConfig(**GEMMA4, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=64),
    "gemma4_per_layer": Gemma4TextConfig(
        **{**GEMMA4, "hidden_size_per_layer_input": 16}, vocab_size_per_layer_input=61, num_kv_shared_layers=2
    ),
}
MIXTURES = ("qwen3_moe", "mixtral", "gemma4_moe")


@dataclass(frozen=True)
class Train:
    ranks: int
    sizes: dict[str, int]  # policy.megatron_cfg, with the names of tests.train.megatron.layouts.Layout; for FSDP2 only tp
    megatron: bool = True

    def fits(self, model: str) -> bool:
        """Return whether the backend supports the layout.

        FSDP2 does not shard experts by tensor parallelism, and a dense model has none. Megatron-Core has no Gemma 4.
        """
        if self.megatron and model.startswith("gemma4"):
            return False
        if model in MIXTURES:
            return self.megatron or self.sizes["tp"] == 1
        return self.sizes.get("ep", 1) == 1


TRAIN = {
    "fsdp2 dp2": Train(2, {"tp": 1}, megatron=False),
    "fsdp2 dp2 tp2": Train(4, {"tp": 2}, megatron=False),
    "fsdp2 tp4": Train(4, {"tp": 4}, megatron=False),  # of two key-value heads
    "megatron tp2": Train(2, {"tp": 2}),
    "megatron tp4": Train(4, {"tp": 4}),
    "megatron pp2": Train(2, {"pp": 2}),
    "megatron tp2 pp2": Train(4, {"tp": 2, "pp": 2}),
    "megatron cp2": Train(2, {"cp": 2}),
    "megatron ep2": Train(2, {"ep": 2, "dp": 2}),
    "megatron tp2 ep2": Train(2, {"tp": 2, "ep": 2}),
}
GENERATE = {
    "tp1": (VLLMConfig(), 1),
    "tp2": (VLLMConfig(tensor_parallel_size=2), 1),
    "tp4": (VLLMConfig(tensor_parallel_size=4), 1),
    "tp2 x 2": (VLLMConfig(tensor_parallel_size=2), 2),
    "ep2": (VLLMConfig(tensor_parallel_size=2, expert_parallel_size=2), 1),
}  # an engine's sizes, and the number of engines


@dataclass(frozen=True)
class Case:
    model: str
    train: str
    generate: str

    @property
    def engines(self) -> tuple[tuple[int, ...], ...]:
        """Return the global ranks of each engine."""
        vllm, count = GENERATE[self.generate]
        size = engine_ranks(vllm)
        return tuple(tuple(range(TRAIN_RANKS + i * size, TRAIN_RANKS + (i + 1) * size)) for i in range(count))

    @property
    def generate_ranks(self) -> tuple[int, ...]:
        return tuple(itertools.chain(*self.engines))

    @property
    def train_ranks(self) -> tuple[int, ...]:
        return tuple(range(TRAIN[self.train].ranks))


def cases(models=MODELS, train=TRAIN, generate=GENERATE) -> list[Case]:
    """Return the cases, ordered so that an engine serves as many as it can."""
    return [
        Case(m, t, g)
        for g, m, t in itertools.product(generate, models, train)
        if TRAIN[t].fits(m) and (g != "ep2" or m in MIXTURES)
    ]


def write_models(folder: Path) -> None:
    """Return a model whose tensors are all random, biases and norms too, and large, so that greedy choices are clear."""
    for name, config in MODELS.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in parameter_name or "scale" in parameter_name else 0.0, 0.15)
        model.save_pretrained(folder / name)
        words = Tokenizer(WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder / name)


def run(chosen: list[Case], folder: Path, transport: str = "planned") -> list[dict]:
    """Return each case's findings, in order. The models must be in `folder`."""
    fork_server.run(_rank, (chosen, folder, transport), TRAIN_RANKS + GENERATE_RANKS)
    return json.loads((folder / "found.json").read_text())


def _rank(rank: int, chosen: list[Case], folder: Path, transport: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TRAIN_RANKS + GENERATE_RANKS)
    spanning = dist.group.WORLD
    realms = {ranks for case in chosen for ranks in (case.train_ranks, *case.engines)}
    groups = {ranks: dist.new_group(ranks) for ranks in sorted(realms)}
    broadcasts = {ranks: dist.new_group((0, *ranks)) for ranks in sorted({case.generate_ranks for case in chosen})}
    found, engine, built = [], None, None
    for number, case in enumerate(chosen):
        own = next((r for r in (case.train_ranks, *case.engines) if rank in r), None)
        dist.group.WORLD = groups[own] if own else spanning
        # Idle ranks made fewer groups; torch names the next group by their number.
        dist.distributed_c10d._world.group_count = 1000 * (number + 1)
        cpu, refit = torch.device("cpu"), broadcasts[case.generate_ranks]
        world = SimpleNamespace(rank=rank, device=cpu, carrier=cpu, spanning=spanning, refit=refit, phase=_phase)
        if rank >= TRAIN_RANKS and built != (case.generate, case.model):
            if engine is not None:
                engine.close()
                _forget_engine_ranks()
            engine, built = _engine(case, folder, own, rank) if own else None, (case.generate, case.model)
        before = set(dist.distributed_c10d._world.pg_map)
        found.append(_refit(case, world, engine if own else None, folder, transport))
        if rank < TRAIN_RANKS and TRAIN[case.train].megatron:
            _end_groups(before)
        if rank == 0:
            print(f"{number + 1} of {len(chosen)}: {case}", file=sys.stderr, flush=True)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier(group=spanning)
    os._exit(0)  # skip the teardown of vLLM and Megatron-Core


@contextlib.contextmanager
def _phase(phase: str, verb: str | None = None) -> Iterator[None]:
    yield


def _policy(case: Case, folder: Path) -> PolicyConfig:
    vllm, _ = GENERATE[case.generate]
    vllm = VLLMConfig(vllm.tensor_parallel_size, 1, vllm.expert_parallel_size, max_model_len=64, enforce_eager=True)
    generation = GenerationConfig(max_num_seqs=8, vllm_cfg=vllm, vllm_kwargs={"kv_cache_memory_bytes": 64 << 20})
    model = str(folder / case.model)
    return PolicyConfig(
        model_name=model,
        tokenizer=TokenizerConfig(name=model),
        precision="float32",
        max_total_sequence_length=64,
        generation=generation,
    )


def _engine(case: Case, folder: Path, own: tuple[int, ...], rank: int):
    from pipeline.generate import build

    return build(_policy(case, folder), len(own), own.index(rank), seed=0)


def _end_groups(kept: set) -> None:
    """Destroy all other groups: each of Megatron-Core's many groups has threads.

    Not after FSDP2, since torch caches its meshes.
    """
    for group in [group for group in dist.distributed_c10d._world.pg_map if group not in kept]:
        dist.destroy_process_group(group)


def _forget_engine_ranks() -> None:
    """Drop vLLM's group of an engine's ranks, which it keeps for the life of a process; the next engine has others."""
    from vllm.distributed import parallel_state

    parallel_state._WORLD = None


def _trained(case: Case, folder: Path):
    from tests.train import ranks
    from tests.train.megatron import layouts

    layout, policy = TRAIN[case.train], _policy(case, folder)
    if not layout.megatron:
        return ranks.backend(policy, ranks.Layout(layout.ranks // layout.sizes["tp"], layout.sizes["tp"]))
    sequence_parallel = case.model in MIXTURES and layout.sizes.get("tp", 1) > 1
    # Otherwise it takes models of this name for those of its own tests, which have three layers.
    even = {"num_layers_in_first_pipeline_stage": None}
    return layouts.backend(policy, layouts.Layout(**layout.sizes, sp=sequence_parallel), **even)


def _refit(case: Case, world, engine, folder: Path, transport: str) -> dict:
    """Run on every rank, idle ones too."""
    trained = _trained(case, folder) if world.rank in case.train_ranks else None
    config = RefitConfig(bucket_bytes=BUCKET_BYTES)
    exact = PlannedRefit(world, config, torch.float32, transport)
    regions, units, own = [], None, None
    if trained is not None:
        regions = trained.layout()
        own = layout_table(regions, trained.shapes)
    elif engine is not None:
        pairs = [(region, unit.name) for unit in engine.layout() for region in unit.regions]
        regions, units = [region for region, _ in pairs], [unit for _, unit in pairs]
        own = layout_table(regions, engine.shapes, units)
    agreed = _agree(case, world, own, trained)
    files = load_file(folder / case.model / "model.safetensors")
    reference = None
    if trained is not None:
        BroadcastRefit(world, BUCKET_BYTES).send(trained)
    elif engine is not None:
        reference = _committed(engine, BroadcastRefit(world, BUCKET_BYTES).receive)
        other = _committed(engine, lambda update: update.load(_other(engine)))
        assert other.completions != reference.completions  # the weights do differ
    report = None
    if own is not None:
        exact.prepare(regions, units, agreed.ranks[world.rank])
        report = exact.send(trained) if trained is not None else None
    if engine is not None:
        update = Watched(engine, files)
        report = exact.receive(update)
        update.commit(2)
    reports = [None] * dist.get_world_size(world.spanning)
    dist.all_gather_object(reports, report, group=world.spanning)
    if world.rank == 0:
        sent, received = ({rank: reports[rank] for rank in ranks} for ranks in (case.train_ranks, case.generate_ranks))
        compare(agreed, list(trained.shapes), sent, received, version=2)
    mine = {}
    if engine is not None:
        now = State.of(engine)
        assert update.seen == len(regions)
        mine = {
            "owned": sum(region.box.numel for region in regions) * 4,
            "received": report.received,
            "wrong": update.wrong + reference.differs(now),
            "completions": now.completions,
        }
    every = [None] * dist.get_world_size(world.spanning)
    dist.all_gather_object(every, mine, group=world.spanning)
    sent = [reports[rank].sent for rank in case.train_ranks]
    return {"generate": [every[rank] for rank in case.generate_ranks], "sent": sent, "rounds": agreed.ranks[0].rounds}


def _agree(case: Case, world, own, trained):
    tables = [None] * dist.get_world_size(world.spanning)
    dist.all_gather_object(tables, own, group=world.spanning)
    agreed = [None]
    if world.rank == 0:
        held, wanted = ({rank: tables[rank] for rank in ranks} for ranks in (case.train_ranks, case.generate_ranks))
        nodes = {rank: "train" if rank < TRAIN_RANKS else "generate" for rank in range(len(tables))}
        agreed = [schedule(held, wanted, case.engines, trained.shapes, 4, BUCKET_BYTES, nodes, NetworkConfig()).plan()]
    dist.broadcast_object_list(agreed, src=0, group=world.spanning)
    return agreed[0]


def _committed(engine, write) -> State:
    update = engine.update()
    write(update)
    update.commit(1)
    return State.of(engine)


def _other(engine) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(9)
    for name, shape in engine.shapes.items():
        yield name, torch.randn(shape, generator=generator)


class Watched:
    """An engine's update that checks every region before its unit is finished.

    Afterwards CPU kernels keep some weights in a packed form that cannot be read.
    """

    def __init__(self, engine, files: dict[str, torch.Tensor]):
        self._update, self._files = engine.update(), files
        self._units = {unit.name: unit.regions for unit in engine.layout()}
        self.seen, self.wrong = 0, []
        self.target, self.in_place, self.commit = self._update.target, self._update.in_place, self._update.commit

    def finish(self, unit: str) -> None:
        for region in self._units[unit]:
            raw = self._update.target(unit, region.tensor)
            held = raw.as_strided(region.box.size, region.strides, raw.storage_offset() + region.offset)
            expected = self._files[region.name]
            self.wrong += [region.name] * (not torch.equal(held, expected[region.box.within(whole(tuple(expected.shape)))]))
            self.seen += 1
        self._update.finish(unit)


@dataclass(frozen=True)
class State:
    """An engine's readable weights and its outputs."""

    tensors: dict[str, torch.Tensor]  # every parameter and buffer
    completions: list[list[int]]  # greedy
    logprobs: list[list[float]]

    @classmethod
    def of(cls, engine) -> State:
        model = engine._engine.model_executor.driver_worker.worker.model_runner.get_model()
        tensors = {name: tensor.clone() for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers())}
        sampling = Sampling(temperature=0.0, max_new_tokens=MAX_TOKENS)
        requests = [Request(str(i), np.array(prompt, np.int32), 0, sampling) for i, prompt in enumerate(PROMPTS)]
        done = drain(engine, requests)
        completions = [done[request.id] for request in requests]
        return cls(tensors, [c.tokens.tolist() for c in completions], [c.logprobs.tolist() for c in completions])

    def differs(self, other: State) -> list[str]:
        """Return the names of what differs from the other, to the last bit."""
        found = [name for name, tensor in self.tensors.items() if not torch.equal(tensor, other.tensors[name])]
        return found + ["log-probs"] * (self.logprobs != other.logprobs)
