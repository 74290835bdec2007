"""Generation with vLLM, stepped in this process: token ids in, token ids and log-probs out.

vLLM uses torch's default process group as its own. So if a run has other components, `world.py` first makes the engine's ranks
the default group. vLLM's tensor parallelism runs over this group through its `external_launcher`. Every rank schedules for
itself, and all schedules are equal, because every rank gets the same requests. Weights can be replaced while requests run: no
batch is in flight then, and a request finds only cached prefixes of the same weights. With speculative decoding
(`vllm_kwargs.speculative_config`) the draft model keeps its loaded weights, and vLLM redraws drafted tokens that the policy
rejects, so log-probs are the policy's.

An engine that shares its GPU can sleep (see `vllm_sleep.py`). Not supported: training the draft model.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import override

from pipeline.config import PolicyConfig, VLLMConfig
from pipeline.config.generation import MOST_SEQUENCES
from pipeline.data.stop_tokens import stop_tokens
from pipeline.generate.engine_state import EngineState, MemoryPart
from pipeline.generate.generate_backend import GenerateBackend, UpdateUnit
from pipeline.generate.request_limits import check_likelihoods, check_pending, new_token_limit
from pipeline.models.decoder import layer_configs
from pipeline.models.hugging_face import checkpoint_shapes, engine_overrides, model_config
from pipeline.models.mixers import has_states
from pipeline.node import builds
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import Completion, Likelihood, LikelihoodRequest, Request, ServedAdapters, VersionSpan

# vLLM reads these at import. It must run in this process, so that we can step the engine and access its weights.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
for _name, _value in {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the launcher has already bound this process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}.items():
    os.environ.setdefault(_name, _value)
if "OMP_NUM_THREADS" in os.environ:
    # vLLM finds n-grams with Numba, which sets OpenMP's thread count for torch too, to the number of cores.
    os.environ.setdefault("NUMBA_NUM_THREADS", os.environ["OMP_NUM_THREADS"])

from vllm.platforms import current_platform  # noqa: E402

if current_platform.is_cpu():
    # Otherwise vLLM compiles C++ for a comparison and a sum: the first batch on a machine would wait half a minute for it.
    current_platform.simple_compile_backend = "eager"

from vllm import EngineArgs, SamplingParams  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import destroy_model_parallel, get_pp_group  # noqa: E402
from vllm.inputs import TokensInput, tokens_input  # noqa: E402
from vllm.outputs import WeightVersionSpan  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine import FinishReason  # noqa: E402
from vllm.v1.engine.core_client import InprocClient  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from pipeline.generate.vllm_adapters import AdapterUpdate, VLLMAdapters, engine_arguments  # noqa: E402
from pipeline.generate.vllm_launcher import launcher_environment  # noqa: E402
from pipeline.generate.vllm_layout import ModuleUnit, record  # noqa: E402
from pipeline.generate.vllm_likelihood import likelihoods  # noqa: E402
from pipeline.generate.vllm_readings import EngineReadings  # noqa: E402
from pipeline.generate.vllm_routing import CPURecorder, RoutingRecorder, routing_arguments  # noqa: E402
from pipeline.generate.vllm_sleep import SLEEP_ARGUMENTS, SleepMode  # noqa: E402
from pipeline.generate.vllm_stop_strings import StopWatch  # noqa: E402
from pipeline.generate.vllm_update import VLLMUpdate  # noqa: E402
from pipeline.generate.vllm_weight_files import LOAD_FORMAT  # noqa: E402

if current_platform.is_cpu():
    from pipeline.generate import vllm_cpu_patches

    vllm_cpu_patches.patch()

_CPU_CACHE_BYTES = 4 << 30  # upper bound; sequences that do not fit wait


class VLLMBackend(GenerateBackend):
    """One rank of a vLLM engine of `engine_ranks`. Construction and every method are collective over them."""

    def __init__(
        self,
        policy: PolicyConfig,
        engine_ranks: int,
        rank_in_engine: int,
        seed: int,
        adapters: ServedAdapters | None = None,
    ) -> None:
        """Build the engine. adapters: if given, updates deliver only these."""
        config = model_config(policy)
        # Before creating the engine: if vLLM runs a transformers model, it changes that model's classes.
        self._shapes, self._tied = checkpoint_shapes(config)
        self._eos = stop_tokens(policy).ids
        self._stop_strings = StopWatch(policy.tokenizer)
        self._max_model_len = policy.generation.vllm_cfg.max_model_len
        self._precision = getattr(torch, policy.precision)
        self._version: int | None = None
        self._state = EngineState()
        self._update: VLLMUpdate | AdapterUpdate | None = None  # the one in progress
        self._ended: list[Completion] = []  # completions for the next step to return
        if current_platform.is_cpu() and not builds.inductor_links(torch.__file__):
            torch.compiler.set_stance("force_eager")
        arguments = EngineArgs(**_arguments(policy, config, engine_ranks, seed, adapters))
        with launcher_environment(engine_ranks, rank_in_engine):
            self._engine = LLMEngine.from_engine_args(arguments, UsageContext.LLM_CLASS)
        # The finalizer would destroy every process group of this process, the world's too, when the engine is collected.
        client = self._engine.engine_core
        assert isinstance(client, InprocClient)  # VLLM_ENABLE_V1_MULTIPROCESSING is 0
        client._finalizer.detach()
        self._core = client.engine_core
        assert isinstance(self._core.scheduler, Scheduler)  # vLLM's only one
        self._scheduler = self._core.scheduler
        self._readings = EngineReadings(self._scheduler)
        worker: Any  # vLLM's classes differ by platform
        (worker,) = self._engine.collective_rpc(lambda worker: worker)
        self._runner = worker.model_runner
        self._model, self._config = self._runner.get_model(), worker.vllm_config
        if current_platform.is_cpu() and policy.generation.vllm_cfg.pipeline_parallel_size > 1:
            _allocate_intermediate_tensors(self._runner)
        self._routing: RoutingRecorder | None = None
        if policy.router_replay.enabled and current_platform.is_cpu():
            self._routing = CPURecorder(self._model, self._runner)
        elif policy.router_replay.enabled and rank_in_engine == 0:
            self._routing = RoutingRecorder(self._model)
        elif policy.router_replay.enabled:
            # vLLM's worker gives the experts to the first tensor-parallel rank alone, and here each rank has a scheduler.
            self._scheduler.aux_output_connector = None
        self._sleep = SleepMode(self._engine, self._model)
        self._adapters: VLLMAdapters | None = None
        if adapters:
            self._shapes = adapters.shapes
            self._adapters = VLLMAdapters(adapters, self._runner, self._precision, self._runner.device)

    @override
    def readings(self) -> dict[str, float]:
        return self._readings.read()

    @property
    @override
    def pending(self) -> int:
        return self._engine.get_num_unfinished_requests() + len(self._ended)

    @property
    @override
    def max_num_seqs(self) -> int:
        return self._config.scheduler_config.max_num_seqs

    @property
    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    @override
    def layout(self) -> list[UpdateUnit]:
        if self._adapters:
            return [self._adapters.unit()]
        return [described.unit for described in self._units.values() if described.unit.regions]

    @cached_property
    def _units(self) -> dict[str, ModuleUnit]:
        with set_current_vllm_config(self._config):
            complete = self._config.model_config.quantization is None
            return record(self._model, self._shapes, self._precision, complete)

    @override
    def add(self, requests: list[Request]) -> None:
        self._state.check_serves()
        limits = [new_token_limit(request, self._max_model_len) for request in requests]
        for request, limit in zip(requests, limits, strict=True):
            prompt, sampling = self._prompt(request), self._sampling_params(request, limit)
            adapters = self._adapters.request if self._adapters else None
            added = self._engine.add_request(request.id, prompt, sampling, lora_request=adapters)
            self._stop_strings.watch(self._engine, added, request.sampling.stop)
            if self._routing:
                self._routing.watch(added, request)

    @override
    def step(self) -> list[Completion]:
        self._state.check_serves()
        ended, self._ended = self._ended, []
        if self._engine.has_unfinished_requests():
            ended += [self._completion(output) for output in self._engine.step()]
        return ended

    @override
    def cut(self, ids: list[str]) -> list[Completion]:
        self._state.check_serves()
        self._finish_in_flight()
        ended = {completion.id: completion for completion in self._ended}
        running = {state.external_req_id: state for state in self._engine.output_processor.request_states.values()}
        check_pending(ids, ended.keys() | running.keys())
        completions = [
            ended[id] if id in ended else self._completion(running[id].make_request_output([], None, FinishReason.LENGTH, None))
            for id in ids
        ]
        self._engine.abort_request([id for id in ids if id in running])
        self._ended = [completion for id, completion in ended.items() if id not in set(ids)]
        return completions

    @override
    def likelihoods(self, requests: Sequence[LikelihoodRequest]) -> list[Likelihood]:
        self._state.check_serves()
        self._finish_in_flight()
        if self._adapters:
            raise RuntimeError(
                "likelihoods: an engine that serves adapters cannot compute them; evaluations serve merged weights"
            )
        check_likelihoods(requests, self._max_model_len, self.pending)
        return likelihoods(self._engine, self._runner, self._model, requests)

    @override
    def progress(self) -> dict[str, tuple[VersionSpan, ...]]:
        running = self._engine.output_processor.request_states.values()
        drawn = {state.external_req_id: _spans(state._weight_version_spans()) for state in running}
        return drawn | {completion.id: completion.spans for completion in self._ended}

    @override
    def update(self) -> VLLMUpdate | AdapterUpdate:
        self._state.begin_update()
        self._finish_in_flight()
        if self._update is not None:
            self._update.give_up()
        if self._adapters:
            self._update = AdapterUpdate(self._adapters, self._shapes, self._serve)
        else:
            self._update = VLLMUpdate(self._model, self._config, self._shapes, self._tied, lambda: self._units, self._serve)
        return self._update

    def _finish_in_flight(self) -> None:
        """Finish the batches in flight, and keep the completions that end in them for the next `step`.

        The tokens of these batches are drawn by the current weights. Batches are in flight if the engine has pipeline stages,
        or if vLLM schedules ahead of the device.
        """
        if not self._core.batch_queue:
            return
        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._core.batch_queue:
            self._ended += [self._completion(output) for output in self._engine.step()]
        self._core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _serve(self, version: int, recompute_kv_cache: bool) -> None:
        running = self._engine.has_unfinished_requests()
        if recompute_kv_cache or not running:
            if not self._engine.reset_prefix_cache(reset_running_requests=running):
                raise RuntimeError("vLLM did not reset its prefix cache")
        else:
            self._rekey_waiting(version)
        self._engine.set_weight_version(str(version))
        self._version, self._update = version, None
        self._state.commit()

    def _rekey_waiting(self, version: int) -> None:
        """Let waiting requests, which were added under the old weights, look up cached prefixes of the new weights."""
        for request in self._scheduler.waiting:
            if request.status != RequestStatus.PREEMPTED:
                request.cache_salt = str(version)
                request.block_hashes.clear()
                request.update_block_hashes()

    @override
    def sleep(self, keep_weights: bool = False) -> None:
        self._state.sleep(keep_weights, self.pending)
        self._finish_in_flight()  # vLLM may have scheduled one batch too many
        self._sleep.sleep(keep_weights)

    @override
    def wake(self, part: MemoryPart) -> None:
        self._state.wake(part)
        self._sleep.wake(part)

    def close(self) -> None:
        """Free the model, the cache and vLLM's own process groups, but not the default group or the world's groups."""
        self._engine.model_executor.shutdown()
        del self._engine, self._core, self._scheduler, self._readings, self._runner, self._model, self._update, self._sleep
        del self._adapters
        destroy_model_parallel()
        gc.collect()
        if current_platform.is_cuda():
            torch.cuda.empty_cache()

    def _prompt(self, request: Request) -> TokensInput:
        return tokens_input(request.tokens.tolist(), cache_salt=str(self._version))  # the salt is part of a prefix's key

    def _sampling_params(self, request: Request, limit: int) -> SamplingParams:
        sampling = request.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed if sampling.temperature > 0 else None,
            max_tokens=limit,
            # vLLM has no tokenizer here, so name every stop token.
            stop_token_ids=[*self._eos, *sampling.stop_token_ids],
            ignore_eos=True,
            logprobs=0,  # the drawn token's only
            flat_logprobs=True,  # one list per request, not one dict per token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
            routed_experts_prompt_start=request.routed,
        )

    def _completion(self, output: Any) -> Completion:
        (drawn,) = output.outputs
        if drawn.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"request {output.request_id}: vLLM ended it with '{drawn.finish_reason}'")
        return Completion(
            id=output.request_id,
            tokens=np.array(drawn.token_ids, dtype=np.int32),
            logprobs=np.array(drawn.logprobs.logprobs, dtype=np.float32),
            spans=_spans(drawn.weight_versions),
            finish=drawn.finish_reason,
            stop=drawn.stop_reason if isinstance(drawn.stop_reason, str) else "",
            experts=self._routing.experts(output.request_id, drawn) if self._routing else None,
        )


def _spans(versions: list[WeightVersionSpan] | None) -> tuple[VersionSpan, ...]:
    assert versions is not None  # `_serve` gives vLLM a version before the first token
    return tuple(VersionSpan(int(span.version), span.end - span.start) for span in versions)


def _arguments(
    policy: PolicyConfig, config: Any, engine_ranks: int, seed: int, adapters: ServedAdapters | None
) -> dict[str, Any]:
    """Return the engine's arguments by their names in vllm.LLM. `vllm_kwargs` overrides all others."""
    generation, vllm_cfg = policy.generation, policy.generation.vllm_cfg
    stages = vllm_cfg.pipeline_parallel_size
    tensor_ranks = engine_ranks // stages
    if tensor_ranks * stages != engine_ranks:
        message = f"got {stages}; expected a divisor of the {engine_ranks} ranks of an engine"
        raise RecipeError(Problem("policy.generation.vllm_cfg.pipeline_parallel_size", "not-divisible", message))
    if vllm_cfg.expert_parallel_size not in (1, tensor_ranks):
        message = f"got {vllm_cfg.expert_parallel_size}; expected 1 or {tensor_ranks}, all ranks of a stage"
        raise RecipeError(Problem("policy.generation.vllm_cfg.expert_parallel_size", "not-a-choice", message))
    arguments = {
        "model": policy.model_name,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "language_model_only": True,  # requests have no pictures; their encoders, if the model has some, take no memory
        "generation_config": "vllm",  # sampling parameters come with the request, not from the model's folder
        "hf_overrides": engine_overrides(policy),
        "dtype": policy.precision,
        "seed": seed,
        "tensor_parallel_size": tensor_ranks,
        "pipeline_parallel_size": stages,
        "enable_expert_parallel": vllm_cfg.expert_parallel_size > 1,
        "max_model_len": vllm_cfg.max_model_len,
        "max_num_seqs": _max_num_seqs(policy, config),
        "gpu_memory_utilization": vllm_cfg.gpu_memory_utilization,
        "enforce_eager": current_platform.is_cpu() if vllm_cfg.enforce_eager is None else vllm_cfg.enforce_eager,
        "enable_prefix_caching": vllm_cfg.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",  # after temperature
        "disable_log_stats": True,
    }
    if dist.is_initialized():
        arguments["distributed_executor_backend"] = "external_launcher"
    if current_platform.is_cpu():
        sequences = arguments["max_num_seqs"] or EngineArgs.get_batch_defaults(engine_ranks)[1][UsageContext.LLM_CLASS]
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(policy, config, tensor_ranks, sequences)
        # Chunked prefill rewinds the request's generator, which CPU generators do not support.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(vllm_cfg.max_model_len, sequences, 4096)
        if policy.precision == "float32" and getattr(config, "kv_lora_rank", None):
            arguments["attention_backend"] = "CPU_MLA"  # on a processor with AMX vLLM chooses another, which has no float32
    elif generation.colocated.enabled:
        arguments |= SLEEP_ARGUMENTS
    if vllm_cfg.precision == "fp8":
        arguments |= _fp8(vllm_cfg)
    if policy.router_replay.enabled:
        arguments |= routing_arguments()
    if adapters:
        arguments |= engine_arguments(adapters)
    arguments |= generation.vllm_kwargs
    if arguments.get("speculative_config"):
        # A draft model's own weights are not refitted: they come from its files and stay.
        arguments["speculative_config"] = {"draft_load_config": {"load_format": LOAD_FORMAT}} | arguments["speculative_config"]
    return arguments


def _fp8(vllm_cfg: VLLMConfig) -> dict[str, Any]:
    """Return the arguments for vLLM's own quantisation of incoming bfloat16 weights to e4m3.

    Each block of weights has a float32 scale. Activations are quantized dynamically in groups of 128. NeMo-RL's fp8 is the same
    (nemo_rl/models/generation/vllm/quantization/fp8.py).
    """
    if current_platform.is_cpu():
        message = "got fp8 without a GPU on this generate rank; expected auto"
        raise RecipeError(Problem("policy.generation.vllm_cfg.precision", "needs-gpu", message))
    names = vllm_cfg.quantization_ignored_layer_kws or []
    return {"quantization": "fp8_per_block", "quantization_config": {"ignore": [f"*{name}*" for name in names]}}


def _max_num_seqs(policy: PolicyConfig, config: Any) -> int | None:
    """Return the argument `max_num_seqs` of vLLM; None for vLLM's own default."""
    if policy.generation.max_num_seqs is None and has_states(config.get_text_config().to_dict()):
        return MOST_SEQUENCES
    return policy.generation.max_num_seqs


def _cpu_cache_bytes(policy: PolicyConfig, config: Any, tensor_ranks: int, sequences: int) -> int:
    """Return the bytes of the KV cache on a CPU: room for `sequences` sequences of `max_model_len`, up to a bound.

    The sizes are rounded up to vLLM's blocks on a CPU.
    """
    text = config.get_text_config()
    width = 0  # of the keys of all layers
    for layer in layer_configs(text):
        heads = max(1, (getattr(layer, "num_key_value_heads", None) or text.num_attention_heads) // tensor_ranks)
        width += heads * (getattr(layer, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    token_bytes = 2 * width * getattr(torch, policy.precision).itemsize
    block = 128
    blocks = -(-policy.generation.vllm_cfg.max_model_len // block)
    total = (sequences * blocks + 1) * block * token_bytes  # vLLM keeps one block for itself
    return max(min(total, _CPU_CACHE_BYTES), (blocks + 1) * block * token_bytes)


def _allocate_intermediate_tensors(runner: Any) -> None:
    """Allocate the tensors that a later pipeline stage receives into. vLLM's warm-up does so on GPUs, but CPU has none."""
    if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
