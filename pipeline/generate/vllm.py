"""Generation with vLLM, stepped in process: token ids in, token ids and log-probs out.

vLLM takes torch's default process group for its own. When it is not the only realm, `world.py` has by then made the engine's
ranks the default group, and vLLM's tensor parallelism runs over them through its `external_launcher`: every rank schedules for
itself, identically, because every rank is given the same requests. Left out: sleep and wake, updates while requests run.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.config import PolicyConfig
from pipeline.generate.requests import eos_token_ids, new_token_limit
from pipeline.generate.weights import checked
from pipeline.models.hugging_face import checkpoint_shapes, model_config
from pipeline.types import Completion, Request

# vLLM reads these when it is imported. In process, or the engine could not be stepped and its weights not be reached.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
for _name, _value in {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the launcher has bound this process already
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}.items():
    os.environ.setdefault(_name, _value)

from vllm.platforms import current_platform  # noqa: E402

if current_platform.is_cpu():
    # Else vLLM builds C++ for a comparison and a sum: the first batch on a machine would wait half a minute for its compiler.
    current_platform.simple_compile_backend = "eager"

from vllm import EngineArgs, SamplingParams  # noqa: E402
from vllm.distributed import destroy_model_parallel  # noqa: E402
from vllm.inputs import tokens_input  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher  # noqa: E402

from pipeline.generate.vllm_reload import reload  # noqa: E402

_CPU_CACHE_BYTES = 4 << 30  # at most; sequences that do not fit wait


class VLLMBackend:
    """One rank of a vLLM engine of `engine_ranks`. Collective over them: construction, and every method."""

    def __init__(self, policy: PolicyConfig, engine_ranks: int, rank_in_engine: int, seed: int) -> None:
        config = model_config(policy)
        self._shapes, self._tied = checkpoint_shapes(config)
        self._eos = eos_token_ids(policy)
        self._max_model_len = policy.generation.vllm_cfg.max_model_len
        self._version: int | None = None
        self._usable = False
        arguments = EngineArgs(**_arguments(policy, config, engine_ranks, seed))
        with _undisturbed(engine_ranks, rank_in_engine):
            self._engine = LLMEngine.from_engine_args(arguments, UsageContext.LLM_CLASS)
        # It would destroy every process group of this process, the world's too, when the engine is collected.
        self._engine.engine_core._finalizer.detach()

    @property
    def pending(self) -> int:
        return self._engine.get_num_unfinished_requests()

    def add(self, requests: list[Request]) -> None:
        self._check_usable()
        limits = [new_token_limit(request, self._max_model_len) for request in requests]
        for request, limit in zip(requests, limits, strict=True):
            self._engine.add_request(request.id, tokens_input(request.tokens.tolist()), self._sampling_params(request, limit))

    def step(self) -> list[Completion]:
        self._check_usable()
        if not self._engine.has_unfinished_requests():
            return []
        return [self._completion(output) for output in self._engine.step()]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if self.pending:
            raise RuntimeError(f"load_weights with {self.pending} requests pending: a completion has one version")
        self._usable = False
        self._engine.collective_rpc(reload, args=(checked(weights, self._shapes, self._tied),))
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache")
        self._version, self._usable = version, True

    def close(self) -> None:
        """Free the model, the cache and vLLM's own process groups; the default group and the world's stay."""
        self._usable = False
        self._engine.model_executor.shutdown()
        del self._engine
        destroy_model_parallel()
        gc.collect()
        if current_platform.is_cuda():
            torch.cuda.empty_cache()

    def _check_usable(self) -> None:
        if not self._usable:
            raise RuntimeError("the engine has no whole set of weights; load_weights must succeed first")

    def _sampling_params(self, request: Request, limit: int) -> SamplingParams:
        sampling = request.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed if sampling.temperature > 0 else None,
            max_tokens=limit,
            # Without a tokenizer vLLM does not know where to stop: every stop token is named.
            stop_token_ids=[*self._eos, *sampling.stop_token_ids],
            ignore_eos=True,
            logprobs=0,  # the drawn token's only
            flat_logprobs=True,  # one list per request, not one dict per token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _completion(self, output: Any) -> Completion:
        (drawn,) = output.outputs
        if drawn.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"request {output.request_id}: vLLM ended it with '{drawn.finish_reason}'")
        return Completion(
            id=output.request_id,
            tokens=np.array(drawn.token_ids, dtype=np.int32),
            logprobs=np.array(drawn.logprobs.logprobs, dtype=np.float32),
            version=self._version,
            finish=drawn.finish_reason,
        )


def _arguments(policy: PolicyConfig, config: Any, engine_ranks: int, seed: int) -> dict[str, Any]:
    """What vllm.LLM takes too; `vllm_kwargs` comes last and overrides."""
    generation, vllm_cfg = policy.generation, policy.generation.vllm_cfg
    arguments = {
        "model": policy.model_name,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling is the request's, not the folder's
        "hf_overrides": dict(policy.hf_config_overrides),
        "dtype": policy.precision,
        "seed": seed,
        "tensor_parallel_size": engine_ranks,
        "max_model_len": vllm_cfg.max_model_len,
        "max_num_seqs": generation.max_num_seqs,
        "gpu_memory_utilization": vllm_cfg.gpu_memory_utilization,
        "enforce_eager": vllm_cfg.enforce_eager,
        "enable_prefix_caching": vllm_cfg.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",  # after temperature
        "disable_log_stats": True,
    }
    if dist.is_initialized():
        arguments["distributed_executor_backend"] = "external_launcher"
    if current_platform.is_cpu():
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(policy, config, engine_ranks)
        # A prompt in pieces makes vLLM rewind the request's generator, which CPU generators cannot.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(vllm_cfg.max_model_len, generation.max_num_seqs, 4096)
    return arguments | generation.vllm_kwargs


def _cpu_cache_bytes(policy: PolicyConfig, config: Any, engine_ranks: int) -> int:
    """Room for `max_num_seqs` sequences of `max_model_len`, in blocks of vLLM's size on CPU, up to a bound."""
    text = config.get_text_config()
    heads = max(1, (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) // engine_ranks)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token_bytes = 2 * text.num_hidden_layers * heads * head_dim * getattr(torch, policy.precision).itemsize
    block = 128
    blocks = -(-policy.generation.vllm_cfg.max_model_len // block)
    wanted = (policy.generation.max_num_seqs * blocks + 1) * block * token_bytes  # vLLM keeps one block for itself
    return max(min(wanted, _CPU_CACHE_BYTES), (blocks + 1) * block * token_bytes)


@contextmanager
def _undisturbed(engine_ranks: int, rank_in_engine: int) -> Iterator[None]:
    """While vLLM starts: the environment that it expects of a launcher. Afterwards: that environment, all random state, and
    torch.set_num_threads (which vLLM's CPU worker replaces) as they were."""
    launcher = {"RANK": rank_in_engine, "WORLD_SIZE": engine_ranks, "LOCAL_RANK": rank_in_engine}
    cuda = current_platform.is_cuda()
    if cuda:
        launcher["LOCAL_RANK"] = torch.cuda.current_device()  # vLLM takes the device of this number
    environment = {name: os.environ.get(name) for name in launcher}
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None
    set_num_threads, distributed_args = torch.set_num_threads, ExecutorWithExternalLauncher._distributed_args
    os.environ.update({name: str(value) for name, value in launcher.items()})
    if engine_ranks > 1 and not cuda:
        # The CPU communicator names its shared memory after what follows the last colon: without this, engines on one node
        # would meet in the same segment.
        name = torch.tensor([os.getpid()])
        dist.broadcast(name, group_src=0)
        init_method = f"env://:{name.item()}"
        ExecutorWithExternalLauncher._distributed_args = lambda _: (init_method, rank_in_engine, rank_in_engine)
    try:
        yield
    finally:
        ExecutorWithExternalLauncher._distributed_args = distributed_args
        torch.set_num_threads = set_num_threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state(states[3])
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
