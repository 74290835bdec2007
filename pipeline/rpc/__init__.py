"""Call verbs on a group of ranks from rank 0; every other rank serves them.

    train = RpcGroup(client, world, ranks, TrainRole, timeouts, role)
    step = train.call(TrainRole.step, ["policy"])       # a Future; rank 0's own part runs at once, in place
    replies = step.result()                             # one reply per rank of the group, in rank order
    loaded = train.scatter(TrainRole.load, parts)       # one argument for each rank

A verb is a method of a role (`pipeline/roles/`) marked with @verb; it takes at most one argument. A type checker checks calls
by the method: the argument, the reply, and that the group's ranks serve the role. Arguments and replies are
msgpack messages, typed by the method's annotations, with numpy arrays as raw bytes. They are never pickles, because anyone on
the cluster can reach the ports of the process groups. Small messages go through rank 0's store: one message for all ranks with
the same argument, and one for all equal replies (`pipeline/store/messaging.py`). A body above `INLINE` bytes follows its
message over the spanning group; ranks that share it forward it to each other.

A verb may return a `StreamingReply`: it sends its reply in parts while the rank serves other verbs.

Nothing here times out: the watchdog reads `RpcClient.overdue` to find late calls and the ranks whose replies are missing.
"""

from pipeline.rpc.calls import Future, RpcClient, RpcError, RpcGroup, stop
from pipeline.rpc.serving import BackgroundRole, serve
from pipeline.rpc.verbs import StreamingReply, verb

__all__ = [
    "BackgroundRole",
    "Future",
    "RpcClient",
    "RpcError",
    "RpcGroup",
    "StreamingReply",
    "serve",
    "stop",
    "verb",
]
