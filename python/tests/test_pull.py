"""The pull design: the sender stages bytes in a registered ring and tells of them over a path of its own, the receiver reads
them with one read each, and its acknowledgement frees the slot.
"""

import contextlib
import hashlib
import inspect
import json
import socket
import threading

import pytest

SLOTS, SLOT = 4, 300_000
COUNT = 60
LONG = 30_000


def payload(n):
    """What step `n` holds."""
    block = hashlib.sha256(str(n).encode()).digest()
    return (block * (SLOT // 32 + 1))[: SLOT - n % 100]


# The sender's process: URL of the receiver, its socket's port, the way of the announcements, the first step.
SENDER = (
    f"SLOTS, SLOT, COUNT = {SLOTS}, {SLOT}, {COUNT}\n"
    + inspect.getsource(payload)
    + """
import hashlib, json, socket, sys
import connex_rs

url, port, way, first = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
engine = connex_rs.Engine("pull", 0, listen_ip="127.0.0.1", transport=TRANSPORT)
ring = engine.allocate_managed_buffer(SLOTS * SLOT)
line = socket.create_connection(("127.0.0.1", port))
heard, said = line.makefile("r"), line.makefile("w")
said.write(engine.local_url + "\\n")
said.flush()

def announce(text):
    if way == "message":
        engine.send_msg(url, text.encode())
    else:
        said.write(text + "\\n")
        said.flush()

def acknowledged():
    if way == "message":
        return int(engine.recv_msg()[1])
    return int(heard.readline())

free = list(range(SLOTS))
held = {}
for n in range(first, COUNT):
    if not free:
        free.append(held.pop(acknowledged()))
    slot = free.pop(0)
    held[n] = slot
    data = payload(n)
    engine.write_bytes_to_buffer(ring + slot * SLOT, data, len(data))
    announce(json.dumps([n, ring + slot * SLOT, len(data)]))
while held:
    held.pop(acknowledged())
engine.close()
"""
)


class Puller:
    """The receiver: hears of steps, reads them, acknowledges."""

    def __init__(self, owner, way):
        self.engine, self.url, self.way = owner.engine, owner.url, way
        self.here = owner.buffer(SLOT)
        self.line = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(60)
        self.port = self.listener.getsockname()[1]

    def meet(self):
        """A sender has started and says where it is."""
        self.leave()
        line, _ = self.listener.accept()
        line.settimeout(60)
        self.line = [line, line.makefile("r"), line.makefile("w")]
        self.sender = self.line[1].readline().strip()

    def leave(self):
        for end in reversed(self.line):
            # What is buffered for a dead sender cannot be flushed.
            with contextlib.suppress(OSError):
                end.close()
        self.line = []

    def hear(self):
        if self.way == "message":
            text = self.engine.recv_msg(LONG)[1].decode()
        else:
            text = self.line[1].readline()
        return json.loads(text)

    def acknowledge(self, n):
        if self.way == "message":
            self.engine.send_msg(self.sender, str(n).encode())
        else:
            self.line[2].write(f"{n}\n")
            self.line[2].flush()

    def pull(self, n, addr, length):
        """One read, and every byte of it."""
        self.engine.write_bytes_to_buffer(self.here, bytes(SLOT), SLOT)
        assert self.engine.transfer_sync_read(self.sender, self.here, addr, length, LONG) == 0
        got = self.engine.read_bytes_from_buffer(self.here, SLOT)
        assert got == payload(n) + bytes(SLOT - length), f"step {n}"

    def close(self):
        self.listener.close()
        self.leave()


@pytest.fixture(params=["message", "socket"])
def puller(request, site):
    puller = Puller(site(1, model="pull"), request.param)
    yield puller
    puller.close()


def test_steps_are_pulled_and_slots_come_back(puller, script):
    process = script(SENDER, puller.url, puller.port, puller.way, 0)
    puller.meet()
    for n in range(COUNT):
        step = puller.hear()
        assert step[0] == n
        puller.pull(*step)
        puller.acknowledge(n)
    assert process.wait(60) == 0, process.stderr.read()


def test_a_sender_killed_midway_and_its_next_life(puller, script):
    process = script(SENDER, puller.url, puller.port, puller.way, 0)
    puller.meet()
    taken = 20
    for n in range(taken):
        step = puller.hear()
        assert step[0] == n
        puller.pull(*step)
        puller.acknowledge(n)
    # One that was told of and never read, and reads that are under way when the sender dies.
    waiting = puller.hear()
    assert waiting[0] == taken
    stop, codes = threading.Event(), []

    def read():
        while not stop.is_set():
            code = puller.engine.transfer_sync_read(puller.sender, puller.here, *waiting[1:], LONG)
            codes.append(code)
            if code:
                return

    reader = threading.Thread(target=read)
    reader.start()
    while not codes:
        reader.join(0.001)
    process.kill()
    reader.join(60)
    stop.set()
    assert codes[-1] == -2 and not any(codes[:-1]), codes[-5:]
    # Nothing comes after the failure, and a slot of the dead is not read.
    puller.engine.write_bytes_to_buffer(puller.here, b"\x55" * SLOT, SLOT)
    assert puller.engine.transfer_sync_read(puller.sender, puller.here, *waiting[1:], LONG) == -2
    assert puller.engine.read_bytes_from_buffer(puller.here, SLOT) == b"\x55" * SLOT
    # Announcements of the dead process that are still queued mean nothing any more.
    if puller.way == "message":
        while puller.engine.recv_msg(0) is not None:
            pass
    # The same identity in its next life goes on where the receiver is.
    process = script(SENDER, puller.url, puller.port, puller.way, taken)
    puller.meet()
    for n in range(taken, COUNT):
        step = puller.hear()
        assert step[0] == n
        puller.pull(*step)
        puller.acknowledge(n)
    assert process.wait(60) == 0, process.stderr.read()
