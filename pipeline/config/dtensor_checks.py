"""What FSDP2's keys, `policy.dtensor_cfg`, say against each other. How the ranks divide is in `pipeline/config/layout.py`."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.layout import DTENSOR
from pipeline.config.schema import PolicyConfig


def check_dtensor(policy: PolicyConfig) -> Iterator[str]:
    """A problem for each pair of keys that cannot be had together."""
    dtensor = policy.dtensor_cfg
    if dtensor.compile and dtensor.tensor_parallel_size > 1:
        yield (
            f"{DTENSOR}.compile: got true with {DTENSOR}.tensor_parallel_size={dtensor.tensor_parallel_size}; expected 1, since"
            f" torch cannot compile these layers cut. Try {DTENSOR}.compile=false"
        )
