"""Readings of a GPU by a stand-in of NVML. Unrun on a GPU, but for the test marked so."""

import types

import pytest
import torch

from pipeline.monitor.gpu import GPUReader, reasons


class NVML:
    """The functions of nvidia-ml-py that the reader calls, for a GPU that lacks some of them."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    class NVMLError(Exception):
        pass

    def __init__(self, unsupported=(), bits=0x4, uuid="GPU-1"):
        self.unsupported, self.bits, self.uuid = unsupported, bits, uuid
        self.calls = []

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != self.uuid:
            raise self.NVMLError("not found")
        return "handle"

    def __getattr__(self, name):
        answers = {
            "nvmlDeviceGetIndex": 3,
            "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=87),
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=60e9, free=20e9),
            "nvmlDeviceGetPowerUsage": 650_000,
            "nvmlDeviceGetTotalEnergyConsumption": 7_000_000,
            "nvmlDeviceGetTemperature": 71,
            "nvmlDeviceGetClockInfo": 1410,
            "nvmlDeviceGetCurrentClocksThrottleReasons": self.bits,
            "nvmlDeviceGetFieldValues": [
                types.SimpleNamespace(nvmlReturn=0, value=types.SimpleNamespace(ullVal=kib)) for kib in (10**6, 2 * 10**6)
            ],
        }

        def call(*arguments):
            self.calls.append(name)
            if name in self.unsupported:
                raise self.NVMLError("Not Supported")
            return answers[name]

        if name not in answers:
            raise AttributeError(name)
        return call


@pytest.fixture(autouse=True)
def cuda(request, monkeypatch):
    """Let torch have two GPUs, of which a thread has the first one until it chooses another."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=0: (device + 1) * 1e9)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=0: (device + 1) * 2e9)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=str(device)))


def reader(nvml, device=1):
    return GPUReader(device, nvml)


def test_every_reading_has_its_unit():
    found = reader(NVML()).read()
    assert found == pytest.approx(
        {
            "gpu_index": 3,
            "gpu_util": 0.87,
            "gpu_memory_gb": 60,
            "gpu_memory_free_gb": 20,
            "power_w": 650,
            "energy_j": 7000,
            "temperature_c": 71,
            "sm_clock_mhz": 1410,
            "throttle_bits": 4,
            "throttled": 1,
            "nvlink_gb_per_s": 3.072,
            "torch_allocated_gb": 2,
            "torch_reserved_gb": 4,
        }
    )


def test_an_unsupported_reading_is_left_out_and_not_asked_for_again():
    nvml = NVML(unsupported=("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetFieldValues"))
    gpu = reader(nvml)
    gpu.read()
    assert not {"energy_j", "nvlink_gb_per_s"} & gpu.read().keys()
    assert nvml.calls.count("nvmlDeviceGetTotalEnergyConsumption") == 1 and nvml.calls.count("nvmlDeviceGetPowerUsage") == 2


def test_before_cuda_begins_nothing_is_read(monkeypatch):
    begun = iter([False, True])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: next(begun))
    gpu = reader(NVML())
    assert gpu.read() == {} and gpu.read()["power_w"] == 650


def test_of_a_gpu_that_nvml_does_not_know_torch_knows_its_own_memory():
    unknown = reader(NVML(), device=0)
    assert unknown.read() == unknown.read() == {"torch_allocated_gb": 1, "torch_reserved_gb": 2}


def test_only_reasons_that_cost_speed_count():
    assert reasons(0x1 | 0x2 | 0x10) == []  # idle, an application's clocks, a synchronised group
    assert reasons(0x40 | 0x4) == ["power cap", "hardware thermal slowdown"]
    assert reader(NVML(bits=0x1)).read()["throttled"] == 0


@pytest.mark.gpu
def test_a_real_gpu_is_read():
    pytest.importorskip("pynvml")
    held = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    found = GPUReader(torch.cuda.current_device()).read()
    assert found["gpu_memory_gb"] > found["torch_reserved_gb"] >= found["torch_allocated_gb"] >= len(held) / 1e9
    assert found["power_w"] > 0 and 0 <= found["gpu_util"] <= 1 and found["sm_clock_mhz"] > 0
