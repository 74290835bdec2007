"""What vLLM leaves behind when it sleeps is brought back. Without a GPU vLLM has no sleep: its part is stood for."""

from types import SimpleNamespace

import pytest
import torch


@pytest.mark.parametrize("inference", [True, False])
def test_tensors_come_back_to_where_they_were(inference, monkeypatch):
    """vLLM loads its model in inference mode or not, by version and by feature; what the former makes is not easily written."""
    pytest.importorskip("vllm")
    from pipeline.generate import vllm_sleep

    monkeypatch.setattr(vllm_sleep, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    woken = []
    engine = SimpleNamespace(wake_up=lambda tags: woken.append(tags))
    with torch.inference_mode(inference):
        slopes = torch.zeros(3)
    sleep = vllm_sleep.SleepMode(engine, torch.nn.Module())
    sleep._saved = [(slopes, torch.tensor([0.5, 0.25, 0.125]))]
    where = slopes.data_ptr()
    sleep.wake("weights")
    assert slopes.is_inference() == inference and slopes.data_ptr() == where
    assert slopes.tolist() == [0.5, 0.25, 0.125] and woken == [["weights"]]
