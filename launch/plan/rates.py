"""What the plan assumes of programs, beside the shares of the peak in `recipes/hardware/*.yaml`: a line each, with its source.

A key that makes a run faster is priced by a line here, or a share there, and where its work is: matrix products in
`train_time.Job.rate`, passes over a model in `train_time.forward_pass` and `update`, weights that wait on the host in
`train_time._swapped` and `_fetched`, refits between ranks that share GPUs in `sharing.refit`, bytes of the head in
`memory_head.py`. What a run has measured corrects all of them (`calibration.py`).
"""

OPTIMIZER_BYTES = 30
"""Of each parameter: float32 weight, gradient and two moments read, all but the gradient written, and a copy in bfloat16."""
PAGE_LOCKED = 0.8
"""Of the rate of the link to the host, which copies of page-locked memory attain. Assumed, not measured."""
GLOO_GB_PER_S = 2.0
"""Of a rank, over gloo within a node, from host memory to host memory. Assumed, not measured."""
TCP_GB_PER_S = 2.5
"""Of a node, into it from others, which gloo reaches by TCP: 20 Gbit/s. Assumed, not measured."""
