"""Rank 0 calls verbs on a component; every other rank serves them.

    step = train.step()            # a Future; rank 0's own share runs at once, in place
    replies = step.result()        # one reply per rank of the component, in rank order

A verb is a method of a role (`pipeline/roles/`) marked with @verb; it takes at most one argument. Arguments and replies are
msgpack messages, typed by the method's annotations, with numpy arrays as raw bytes: never a pickle, because the ports of the
process groups are open to everyone on the cluster. Small messages go through rank 0's store, one for all ranks that get the
same and one for all that reply the same (`pipeline/store/messaging.py`). A body above `INLINE` bytes follows its message over
the spanning group, forwarded from rank to rank where several get it.

A verb may return a `StreamingReply`: it sends its reply in parts while the rank serves other verbs.

There are no timeouts here: `overdue` tells the watchdog which calls are late and whose reply is missing.
"""

from pipeline.rpc.calls import Future, RpcClient, RpcError, RpcGroup, stop
from pipeline.rpc.serving import BackgroundWorker, serve
from pipeline.rpc.verbs import StreamingReply, verb

__all__ = [
    "BackgroundWorker",
    "Future",
    "RpcClient",
    "RpcError",
    "RpcGroup",
    "StreamingReply",
    "serve",
    "stop",
    "verb",
]
