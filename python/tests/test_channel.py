"""Step channels: whatever has an array's memory goes in, views come out, slots come back."""

import array
import asyncio
import ctypes
import gc
import threading
import time

import pytest

import connex_rs.channel

np = pytest.importorskip("numpy")

LONG = 60_000
SHORT = 50


def opened(a, b, name="test", **ring):
    sender = a.engine.channel(b.url, name, **ring)
    receiver = b.engine.accept_channel(name, timeout_ms=LONG)
    assert (sender.name, sender.peer) == (name, b.engine.id)
    assert (receiver.name, receiver.peer) == (name, a.engine.id)
    sender.wait_open(LONG)
    return sender, receiver


class Tensor:
    """What a PyTorch tensor looks like from outside."""

    def __init__(self, values, contiguous=True, device="cpu"):
        self._memory = (ctypes.c_uint16 * len(values))(*values)
        self.shape = (len(values),)
        self.dtype = "torch.bfloat16"
        self.device = device
        self._contiguous = contiguous

    def data_ptr(self):
        return ctypes.addressof(self._memory)

    def element_size(self):
        return 2

    def is_contiguous(self):
        return self._contiguous


class DLPack:
    """An array of which only the DLPack protocol shows."""

    def __init__(self, inner):
        self._inner = inner

    def __dlpack__(self):
        return self._inner.__dlpack__()


def test_arrays_of_every_kind(pair):
    sender, receiver = opened(*pair)
    floats = np.arange(12, dtype=np.float32).reshape(3, 4)
    halves = np.linspace(0, 1, 5).astype(np.float16)
    words = array.array("q", [1, -2, 3])
    sender.send(
        [floats, halves, words, b"bytes", bytearray(b"more"), memoryview(b"view")],
        corr=2**64 - 1,
        timeout_ms=LONG,
    )
    sender.send([Tensor([1, 2, 3]), DLPack(floats), np.float64(2.5), np.empty((0, 3), np.int32)])
    sender.send([])
    first, second, third = (receiver.recv(LONG) for _ in range(3))
    assert first.corr == 2**64 - 1
    assert first.dtypes == ["float32", "float16", "int64", "uint8", "uint8", "uint8"]
    assert first.shapes == [(3, 4), (5,), (3,), (5,), (4,), (4,)]
    assert (first[0] == floats).all() and first[0].dtype == np.float32
    assert (first[1] == halves).all()
    assert first[2].tolist() == [1, -2, 3]
    assert [bytes(view) for view in first[3:]] == [b"bytes", b"more", b"view"]
    for view in first[:3]:
        assert view.ctypes.data % 64 == 0
    # NumPy knows no bfloat16: its bytes, with the type's name beside.
    assert (second.dtypes[0], second.shapes[0]) == ("bfloat16", (3,))
    assert bytes(second[0]) == bytes(second.memory(0)) == b"\1\0\2\0\3\0"
    assert (second[1] == floats).all()
    assert second[2].shape == () and second[2] == 2.5
    assert second[3].shape == (0, 3) and second[3].dtype == np.int32
    assert len(third) == 0 and third.corr == 0


def test_without_numpy_views_are_memoryviews(pair, monkeypatch):
    monkeypatch.setattr(connex_rs.channel, "_numpy", lambda: None)
    sender, receiver = opened(*pair)
    sender.send([np.arange(6, dtype=np.int16).reshape(2, 3), np.float16(1)])
    step = receiver.recv(LONG)
    assert isinstance(step[0], memoryview)
    assert step[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert bytes(step[1]) == np.float16(1).tobytes()


def test_what_is_not_an_array_is_refused(pair):
    sender, receiver = opened(*pair, slot_bytes=1000)
    square = np.arange(16).reshape(4, 4)
    for bad in (
        square.T,
        memoryview(b"abcd")[::2],
        Tensor([1], contiguous=False),
        DLPack(square.T),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            sender.send([bad])
    with pytest.raises(ValueError, match="cuda:0"):
        sender.send([Tensor([1], device="cuda:0")])
    for bad in ([1], ["text"], [None], b"bytes"):
        with pytest.raises(TypeError):
            sender.send(bad)
    with pytest.raises(ValueError, match="1000"):
        sender.send([bytes(1025)])
    with pytest.raises(ValueError):
        sender.send([], corr=-1)
    for ring in ({"slots": 1}, {"slots": 10**6}, {"slot_bytes": 0}):
        with pytest.raises(ValueError):
            pair[0].engine.channel(pair[1].url, **ring)
    # None of them took a slot or hurt the channel.
    sender.send([bytes(1000)], corr=1)
    assert receiver.recv(LONG).corr == 1
    assert receiver.untaken == []


def test_slots_come_back_with_the_last_view_or_by_release(pair):
    sender, receiver = opened(*pair, slots=2, slot_bytes=64)
    for corr in range(2):
        sender.send([np.full(8, corr)], corr, LONG)
    with pytest.raises(TimeoutError):
        sender.send([np.full(8, 9)], 9, SHORT)
    assert sender.untaken == [0, 1]
    view = receiver.recv(LONG)[0]
    gc.collect()
    # The step is gone, its view is not.
    assert receiver.untaken == [0]
    with pytest.raises(TimeoutError):
        sender.send([np.full(8, 9)], 9, SHORT)
    assert (view == 0).all()
    del view
    sender.send([np.full(8, 2)], 2, LONG)
    with receiver.recv(LONG) as step:
        assert (step[0] == 1).all()
    with pytest.raises(ValueError, match="released"):
        step[0]
    step.release()
    last = receiver.recv(LONG)
    assert last.corr == 2
    with pytest.raises(TimeoutError):
        receiver.recv(0)
    del last
    sender.drain(LONG)


def test_views_outlive_everything(pair):
    a, b = pair
    sender, receiver = opened(a, b)
    sender.send([np.arange(1000)], 1)
    step = receiver.recv(LONG)
    view = step[0]
    step.release()
    receiver.close()
    del step, receiver
    a.engine.close()
    b.engine.close()
    gc.collect()
    assert view.sum() == 499_500


def test_a_loop_ends_with_a_clean_close(pair):
    sender, receiver = opened(*pair)

    def feed():
        with sender:
            for corr in range(100):
                sender.post([np.full(1000, corr)], corr)

    thread = threading.Thread(target=feed)
    thread.start()
    total = 0
    for step in receiver:
        assert (step[0] == step.corr).all()
        total += step.corr
    thread.join()
    assert total == 4950
    assert receiver.recv(LONG) is None
    with pytest.raises(RuntimeError, match="canceled"):
        sender.send([b"x"])


def test_async_for_and_async_sends(pair):
    sender, receiver = opened(*pair, slots=2)

    async def feed():
        for corr in range(200):
            await sender.send_async([np.full(100, corr)], corr)
        sender.close()

    async def take():
        feeding = asyncio.ensure_future(feed())
        corrs = []
        async for step in receiver:
            assert (step[0] == step.corr).all()
            corrs.append(step.corr)
        await feeding
        return corrs

    assert asyncio.run(asyncio.wait_for(take(), 60)) == list(range(200))


def test_a_task_that_is_cancelled_takes_no_step(pair):
    sender, receiver = opened(*pair)

    async def main():
        task = asyncio.ensure_future(receiver.recv_async())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sender.send_async([b"x"], 7)
        return await asyncio.wait_for(receiver.recv_async(), 60)

    assert asyncio.run(main()).corr == 7


def test_failures_name_what_was_not_taken(pair):
    a, b = pair
    sender, receiver = opened(a, b)
    for corr in (5, 6, 7):
        sender.send([b"data"], corr)
    receiver.recv(LONG).release()
    held = receiver.recv(LONG)
    while 5 in sender.untaken:
        time.sleep(0.001)
    b.engine.disconnect(a.engine.id)
    with pytest.raises(ConnectionError) as raised:
        sender.drain(LONG)
    assert raised.value.untaken == [6, 7]
    assert raised.value.peer == b.engine.id
    with pytest.raises(ConnectionError) as raised:
        sender.send([b"data"], 8)
    assert raised.value.untaken == [6, 7]
    assert bytes(held[0]) == b"data"
    # A fresh one works.
    sender, receiver = opened(a, b, "again")
    sender.send([b"data"], 9)
    assert receiver.recv(LONG).corr == 9


def test_a_sender_dropped_unclosed_is_a_failure(pair):
    sender, receiver = opened(*pair)
    sender.send([b"x"], 1)
    held = receiver.recv(LONG)
    del sender
    gc.collect()
    with pytest.raises(ConnectionError, match="without being closed") as raised:
        receiver.recv(LONG)
    assert raised.value.untaken == [1]
    held.release()


def test_a_killed_sender_and_its_next_life(site, script):
    owner = site(1, model="killed")
    text = """
import sys, time
import connex_rs
engine = connex_rs.Engine("killed", 0, listen_ip="127.0.0.1", transport=TRANSPORT)
channel = engine.channel(sys.argv[1])
channel.send([bytes(range(256)) * 16], corr=3)
if sys.argv[2] == "hang":
    time.sleep(100)
channel.close()
channel.drain(30_000)
engine.close()
"""
    process = script(text, owner.url, "hang")
    receiver = owner.engine.accept_channel(timeout_ms=LONG)
    step = receiver.recv(LONG)
    process.kill()
    with pytest.raises(ConnectionError) as raised:
        receiver.recv(LONG)
    assert raised.value.untaken == [3]
    assert bytes(step[0]) == bytes(range(256)) * 16
    process = script(text, owner.url, "end")
    fresh = owner.engine.accept_channel(timeout_ms=LONG)
    assert [step.corr for step in fresh] == [3]
    assert process.wait(30) == 0, process.stderr.read()


def test_data_lands_while_the_interpreter_is_busy(pair):
    sender, receiver = opened(*pair, slots=4)
    transfers = [sender.post([np.full(100_000, corr, np.uint8)], corr) for corr in range(4)]
    # Holds the interpreter lock: nothing of Python runs on any other thread meanwhile.
    libc = ctypes.PyDLL(None)
    libc.sleep(2)
    assert all(transfer.done() for transfer in transfers)
    assert [(step.corr, int(step[0].sum())) for step in (receiver.recv(0) for _ in range(4))] == [
        (corr, corr * 100_000) for corr in range(4)
    ]


def test_accepting_times_out_and_wakes_at_close(pair):
    a, b = pair
    with pytest.raises(TimeoutError, match='named "nobody" within 50 ms'):
        b.engine.accept_channel("nobody", timeout_ms=SHORT)
    outcome = []

    def accept():
        try:
            b.engine.accept_channel()
        except RuntimeError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=accept)
    thread.start()
    time.sleep(0.05)
    b.engine.close()
    thread.join(20)
    assert outcome and outcome[0].startswith("canceled")
    with pytest.raises(RuntimeError, match="canceled"):
        b.engine.channel(a.url)
