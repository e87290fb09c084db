"""Mooncake Transfer Engine over TCP. `MC_TCP_ENABLE_CONNECTION_POOL` and `MC_TCP_SLICE_SIZE` are passed through."""

import socket

import pair
from mooncake.engine import TransferEngine


def engine():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = TransferEngine()
    if started.initialize(f"127.0.0.1:{port}", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("Mooncake did not start")
    return started


def register(started, length):
    view, addr = pair.pages(length)
    if started.register_memory(addr, length) != 0:
        raise SystemExit("Mooncake did not register the buffer")
    return view, addr


KEPT = []


def own(length):
    started = engine()
    KEPT.append(started)
    view, addr = register(started, length)
    return {"name": f"127.0.0.1:{started.get_rpc_port()}", "addr": addr}, view


class Reader:
    def __init__(self, offer, length):
        self.engine = engine()
        self.buffer, self.addr = register(self.engine, length)
        self.peer, self.remote = offer["name"], offer["addr"]

    def read(self, size):
        if self.engine.transfer_sync_read(self.peer, self.addr, self.remote, size) != 0:
            raise SystemExit("a read failed")

    def write(self, size):
        if self.engine.transfer_sync_write(self.peer, self.addr, self.remote, size) != 0:
            raise SystemExit("a write failed")


pair.main("mooncake", own, Reader)
