"""The broadcast's wire format over three real processes: every dtype, odd shapes, buckets smaller than a tensor."""

import socket
from types import SimpleNamespace

import torch
import torch.distributed as dist

from pipeline.refit.broadcast import BroadcastRefit
from tests import fork_server

SHAPES = ((), (1,), (3, 5), (7,), (64, 33), (2, 3, 4), (0,), (100,))


def weights() -> list[tuple[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [(f"{shape}.{dtype}", torch.randn(shape, generator=rng).to(dtype)) for shape in SHAPES for dtype in dtypes]


class Sender:
    """Yields one reused buffer, as a backend may: a tensor is only valid until the next is requested."""

    def weights(self):
        for name, tensor in weights():
            buffer = tensor.clone()
            yield name, buffer
            buffer.fill_(torch.nan)


class Receiver:
    """Keeps the tensors that it receives, as an engine may."""

    def load(self, received):
        self.received = dict(received)


def rank_main(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    world = SimpleNamespace(rank=rank, carrier=torch.device("cpu"), refit=dist.group.WORLD)
    for bucket_bytes in (1, 1000, 1 << 20):
        refit = BroadcastRefit(world, bucket_bytes)
        if rank == 0:
            assert refit.send(Sender()).sent >= sum(tensor.nbytes for _, tensor in weights())
            continue
        receiver = Receiver()
        assert refit.receive(receiver).received >= sum(tensor.nbytes for _, tensor in weights())
        assert list(receiver.received) == [name for name, _ in weights()]
        for name, tensor in weights():
            got = receiver.received[name]
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(got, tensor), name
    dist.destroy_process_group()


def test_received_tensors_equal_the_sent_ones():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork_server.run(rank_main, (port,), 3)
