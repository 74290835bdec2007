"""Check the readings that a real engine's scheduler gives to the resource monitor."""

import numpy as np

from pipeline.types import Request, Sampling
from tests.generate.tiny import drain, refit, requests


def test_requests_cache_prefixes_and_preemptions(new_engine, checkpoint):
    engine = new_engine("vllm", "llama", max_num_seqs=4, max_model_len=192)
    assert engine.readings()["running"] == engine.readings()["kv_cache"] == 0
    drawn = requests(6, 1, temperature=0.0, max_new_tokens=8)
    engine.add(drawn)
    engine.step()
    now = engine.readings()
    assert (now["running"], now["queued"]) == (4, 2) and 0 < now["kv_cache"] <= 1
    refit(engine, checkpoint("llama", 1).weights(), version=1)
    while engine.pending:
        engine.step()
    assert engine.readings()["preemptions"] == 0, "new weights preempt every request on purpose"

    before = engine.readings()
    prompt = np.arange(2, 2 + 130, dtype=np.int32) % 50 + 2
    for id in ("first", "second"):
        drain(engine, [Request(id, prompt, 0, Sampling(max_new_tokens=1, temperature=0.0))])
    after = engine.readings()
    assert after["prefix_queries"] - before["prefix_queries"] == 260
    assert after["prefix_hits"] - before["prefix_hits"] == 128, "a whole block of the second prompt"


def test_a_preempted_request_is_counted(new_engine):
    engine = new_engine("vllm", "llama", max_num_seqs=4)
    engine.add(requests(2, 1, temperature=0.0, max_new_tokens=8))
    engine.step()
    scheduler = engine._core.scheduler
    scheduler._preempt_request(scheduler.running.pop(), 0.0)
    assert engine.readings()["preemptions"] == 1
