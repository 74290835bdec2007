"""State that vLLM drops when it sleeps is restored. Without a GPU vLLM has no sleep, so its part is replaced."""

from types import SimpleNamespace

import pytest
import torch


@pytest.mark.parametrize("inference", [True, False])
def test_tensors_are_restored_to_their_places(inference, monkeypatch):
    """By version and feature, vLLM loads its model in inference mode, whose tensors cannot be written normally."""
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
