"""Lists what the plan assumes of programs beside the shares of the peak in `recipes/hardware/*.yaml`, each with its source.

A key that makes a run faster is priced by a line here, or a share there, and where its work is: matrix products in
`train_time.Job.rate`, passes over a model in `train_time.forward_pass` and `update`, weights that wait on the host in
`train_time._swapped` and `_fetched`, refits between ranks that share GPUs in `sharing.refit`, bytes of the head in
`memory_head.py`. What a run has measured corrects all of them (`calibration.py`).
"""

OPTIMIZER_BYTES = 30
"""Bytes that an update moves for each parameter: float32 weight, gradient and two moments are read, all but the gradient are
written, and a copy in bfloat16."""
PAGE_LOCKED = 0.8
"""Share of the host link's rate that copies of page-locked memory attain. Assumed, not measured."""
GLOO_GB_PER_S = 2.0
"""GB/s of a rank over gloo within a node, from host memory to host memory. Assumed, not measured."""
TCP_GB_PER_S = 2.5
"""GB/s into a node from others over TCP, which gloo uses: 20 Gbit/s. Assumed, not measured."""
IPC_GB_PER_S = 20.0
"""GB/s into a rank through memory that it maps. slime's buckets over CUDA IPC bring the 61 GB of Qwen3-30B-A3B in bfloat16 to
engines on the same 8 H200 in 3.0 s, loading included: github.com/vllm-project/vime/issues/175. Not measured here."""
