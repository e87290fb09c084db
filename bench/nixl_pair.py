"""NIXL with its UCX backend. `UCX_TLS` decides what UCX uses."""

import base64

import pair
from nixl_cu12._api import nixl_agent, nixl_agent_config

KEPT = []


def own(length):
    agent = nixl_agent("owner", nixl_agent_config(backends=["UCX"]))
    view, addr = pair.pages(length)
    KEPT.append((agent, agent.register_memory([(addr, length, 0, "")], "DRAM")))
    return {"metadata": base64.b64encode(agent.get_agent_metadata()).decode(), "addr": addr}, view


class Reader:
    def __init__(self, offer, length):
        self.agent = nixl_agent("reader", nixl_agent_config(backends=["UCX"]))
        self.buffer, self.addr = pair.pages(length)
        self.registered = self.agent.register_memory([(self.addr, length, 0, "")], "DRAM")
        self.peer = self.agent.add_remote_agent(base64.b64decode(offer["metadata"]))
        self.remote = offer["addr"]
        self.handles = {}

    def run(self, op, size):
        # A prepared transfer is posted again and again: what NIXL's own benchmark does.
        handle = self.handles.get((op, size))
        if handle is None:
            here = self.agent.get_xfer_descs([(self.addr, size, 0)], "DRAM")
            there = self.agent.get_xfer_descs([(self.remote, size, 0)], "DRAM")
            handle = self.agent.initialize_xfer(op, here, there, self.peer)
            self.handles[op, size] = handle
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit(f"a transfer ended as {state}")

    def read(self, size):
        self.run("READ", size)

    def write(self, size):
        self.run("WRITE", size)


pair.main("nixl", own, Reader)
