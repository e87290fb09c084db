"""connex-rs from Python. `CONNEX_RS_TRANSPORT` and `UCX_TLS` decide what carries the bytes."""

import pair

from connex_rs import Engine

KEPT = []


def own(length):
    engine = Engine("bench", 1, listen_ip="127.0.0.1")
    view, addr = pair.pages(length)
    if engine.register_memory(addr, length) != 0:
        raise SystemExit("the buffer was not registered")
    KEPT.append(engine)
    return {"url": engine.local_url, "addr": addr}, view


class Reader:
    def __init__(self, offer, length):
        self.engine = Engine("bench", 0, listen_ip="127.0.0.1")
        self.buffer, self.addr = pair.pages(length)
        self.engine.register_memory(self.addr, length)
        self.url, self.remote = offer["url"], offer["addr"]

    def read(self, size):
        code = self.engine.transfer_sync_read(self.url, self.addr, self.remote, size)
        if code != 0:
            raise SystemExit(f"a read failed with {code}")

    def write(self, size):
        code = self.engine.transfer_sync_write(self.url, self.addr, self.remote, size)
        if code != 0:
            raise SystemExit(f"a write failed with {code}")


pair.main("connex-rs", own, Reader)
