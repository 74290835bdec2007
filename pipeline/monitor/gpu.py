"""Read a rank's GPU by NVML (the package nvidia-ml-py, part of the extra `gpu`). Not yet run on a GPU.

Each value is one small function. A value that the GPU or its driver does not support is left out from then on.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from pipeline.monitor.readings import GB, Sample

logger = logging.getLogger(__name__)

SLOWED = {
    "power cap": 0x4,
    "hardware slowdown": 0x8,
    "software thermal slowdown": 0x20,
    "hardware thermal slowdown": 0x40,
    "hardware power brake": 0x80,
}
"""Reasons for lower clocks that cost speed: bits of nvmlDeviceGetCurrentClocksEventReasons (NVML API reference, NvmlClocksEvent
Reasons). Idle, an application's clocks and a synchronised group are not among them."""
NVLINK_FIELDS = ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX")
ALL_LINKS = 0xFFFFFFFF
"""scopeId of a field that sums over all links."""


def reasons(bits: float) -> list[str]:
    """Return the names of the reasons for a lower clock whose bits are set in the reading `throttle_bits`."""
    return [name for name, bit in SLOWED.items() if int(bits) & bit]


class GPUReader:
    """Reads a GPU of this process, by NVML and torch; without NVML, only by torch. No readings until CUDA is initialised."""

    def __init__(self, device: int, nvml: Any = None):
        """Bind to a GPU. nvml: None: the installed module.

        device: torch's index. It is a parameter because torch's current device differs between threads.
        """
        self._device = device
        self._nvml = nvml
        self._handle: Any = None
        self._absent = False  # no NVML here
        self._values: list[tuple[str, Callable[[], Sample]]] = []

    def read(self) -> Sample:
        """Return the readings that the GPU supports."""
        if not torch.cuda.is_initialized():  # a sampler must not do that
            return {}
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        found: Sample = {"torch_allocated_gb": allocated / GB, "torch_reserved_gb": reserved / GB}
        if self._handle is None and not self._absent:
            self._open(f"GPU-{torch.cuda.get_device_properties(self._device).uuid}")
        for each in list(self._values):
            try:
                found |= each[1]()
            except self._nvml.NVMLError as error:
                self._values.remove(each)
                logger.info("the GPU's %s cannot be read (%s); samples leave it out", each[0], error)
        return found

    def _open(self, uuid: str) -> None:
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except ImportError:
            self._give_up("nvidia-ml-py is not installed: pip install nvidia-ml-py")
        except self._nvml.NVMLError as error:
            self._give_up(str(error))
        else:
            self._values = list(self._readings().items())

    def _give_up(self, why: str) -> None:
        self._absent = True
        logger.warning("the GPU is not sampled: %s", why)

    def _readings(self) -> dict[str, Callable[[], Sample]]:
        nvml, gpu = self._nvml, self._handle

        def memory() -> Sample:
            found = nvml.nvmlDeviceGetMemoryInfo(gpu)
            return {"gpu_memory_gb": found.used / GB, "gpu_memory_free_gb": found.free / GB}

        def clocks() -> Sample:
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
            return {"throttle_bits": float(bits), "throttled": float(bool(reasons(bits)))}

        def nvlink() -> Sample:
            fields = [(getattr(nvml, name), ALL_LINKS) for name in NVLINK_FIELDS]
            values = nvml.nvmlDeviceGetFieldValues(gpu, fields)
            if any(value.nvmlReturn for value in values):
                raise nvml.NVMLError(values[0].nvmlReturn)
            return {"nvlink_gb_per_s": sum(value.value.ullVal for value in values) * 1024 / GB}  # the unit is KiB

        return {
            "index": lambda: {"gpu_index": float(nvml.nvmlDeviceGetIndex(gpu))},
            "utilisation": lambda: {"gpu_util": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100},
            "memory": memory,
            "power": lambda: {"power_w": nvml.nvmlDeviceGetPowerUsage(gpu) / 1000},
            "energy": lambda: {"energy_j": nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000},
            "temperature": lambda: {"temperature_c": float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))},
            "clock": lambda: {"sm_clock_mhz": float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))},
            "clock event reasons": clocks,
            "NVLink": nvlink,
        }
