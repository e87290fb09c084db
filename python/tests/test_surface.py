"""Every member of the surface, used as it is meant to be."""

import os
import re
import time

import pytest

import connex_rs

MAX = 2**32 - 1


def test_properties(site):
    a = site(3, shard=MAX, replica=7)
    engine = a.engine
    assert engine.id == (engine.id[0], 3, MAX, 7)
    assert engine.local_url == f"127.0.0.1:{engine.port}#{engine.id[0]}|3|{MAX}|7"
    assert engine.closed is False
    engine.close()
    assert engine.closed is True
    assert engine.port and engine.local_url and engine.id
    assert "closed" in repr(engine)


def test_clock_is_the_monotonic_one():
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    now = connex_rs.now_ns()
    assert before <= now <= time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def test_version_is_that_of_the_package():
    from importlib.metadata import version

    assert connex_rs.__version__ == version("connex-rs")


@pytest.mark.parametrize("size", [1, 64, 4095, 4096, 4097, (1 << 20) + 7])
def test_read_and_write(pair, size):
    a, b = pair
    data = os.urandom(size)
    here, there = a.buffer(size), b.buffer(size, data)
    assert a.engine.transfer_sync_read(b.url, here, there, size) == 0
    assert a.bytes(here, size) == data
    data = os.urandom(size)
    a.engine.write_bytes_to_buffer(here, data, size)
    assert a.engine.transfer_sync_write(b.url, here, there, size) == 0
    assert b.bytes(there, size) == data


def test_offsets_inside_a_region(pair):
    a, b = pair
    here, there = a.buffer(100, bytes(100)), b.buffer(100, bytes(range(100)))
    assert a.engine.transfer_sync_read(b.url, here + 5, there + 50, 20) == 0
    assert a.bytes(here, 100) == bytes(5) + bytes(range(50, 70)) + bytes(75)


def test_async(pair):
    a, b = pair
    here, there = a.buffer(8192), b.buffer(8192, b"x" * 8192)
    get = a.engine.get_async(b.url, here, there, 4096)
    assert get.wait() is True and get.done() is True
    assert get.wait(0) is True, "a wait can be repeated"
    put = a.engine.put_async(b.url, here, there + 4096, 4096, 20_000)
    assert put.wait(20_000) is True
    assert "done" in repr(put)


def test_many(pair):
    a, b = pair
    count, step = 1000, 64
    data = os.urandom(count * step)
    here, there = a.buffer(count * step), b.buffer(count * step, data)
    ranges = [(here + i * step, there + (count - 1 - i) * step, step) for i in range(count)]
    assert a.engine.get_many(b.url, ranges).wait() is True
    steps = [data[i * step :][:step] for i in range(count)]
    assert a.bytes(here, count * step) == b"".join(reversed(steps))
    assert a.engine.put_many(b.url, iter([list(r) for r in ranges])).wait() is True
    assert b.bytes(there, count * step) == data, "what was reversed twice"
    assert a.engine.get_many(b.url, []).wait() is True


def test_signal_comes_after_the_data(pair):
    a, b = pair
    size = 3 << 20
    data = os.urandom(size)
    here, there = a.buffer(size, data), b.buffer(size)
    transfer = a.engine.put_signal(b.url, here, there, size, b"step 1")
    assert b.engine.recv_msg(20_000) == (a.engine.id, b"step 1")
    assert b.bytes(there, size) == data
    assert transfer.wait() is True


def test_chain(pair):
    a, b = pair
    data = os.urandom(200_000)
    here, there = a.buffer(1 << 20, data + b"\x01" * 8), b.buffer(1 << 20, bytes(300_000))
    chain = [
        (here, there, 100_000),
        (here + 100_000, there + 100_000, 100_000),
        (here + 200_000, there + 250_000, 8),
    ]
    assert a.engine.put_chain(b.url, chain).wait() is True
    assert b.bytes(there, 200_000) == data
    assert b.bytes(there + 250_000, 8) == b"\x01" * 8


@pytest.mark.parametrize(
    "data", [b"", b"abc", bytearray(b"abc"), memoryview(b"abcdef")[::2], memoryview(bytearray(9))]
)
def test_messages_take_whatever_is_like_bytes(linked, data):
    a, b = linked
    a.engine.send_msg(b.url, data)
    a.engine.send_msg(b.engine.id, data)
    for _ in range(2):
        assert b.engine.recv_msg(20_000) == (a.engine.id, bytes(data))


def test_messages_stay_in_order_both_ways(linked):
    a, b = linked
    for i in range(500):
        a.engine.send_msg(b.engine.id, b"%d" % i)
        b.engine.send_msg(list(a.engine.id), b"%d" % -i)
    for i in range(500):
        assert b.engine.recv_msg(20_000) == (a.engine.id, b"%d" % i)
        assert a.engine.recv_msg(20_000) == (b.engine.id, b"%d" % -i)
    assert a.engine.recv_msg(0) is None


def test_buffers_take_whatever_is_like_bytes(site):
    a = site()
    ptr = a.buffer(16, b"0123456789abcdef")
    for data in b"AB", bytearray(b"AB"), memoryview(b"ABC"), memoryview(b"A-B-")[::2]:
        assert a.engine.write_bytes_to_buffer(ptr, data, 2) == 0
        assert a.bytes(ptr, 3) == b"AB2"
        assert a.engine.write_bytes_to_buffer(ptr, b"01", 2) == 0
    assert a.engine.write_bytes_to_buffer(ptr, b"", 0) == 0
    assert a.bytes(ptr, 0) == b""
    big = os.urandom(1 << 20)
    ptr = a.buffer(1 << 20, big)
    assert a.bytes(ptr, 1 << 20) == big


def test_managed_buffers(site):
    a = site()
    ptr = a.engine.allocate_managed_buffer(10_000)
    assert ptr % 4096 == 0
    assert a.bytes(ptr, 10_000) == bytes(10_000)
    assert a.engine.stats()["regions"] == 1
    assert a.engine.stats()["region_bytes"] == 10_000
    assert a.engine.free_managed_buffer(ptr, 10_000) == 0
    assert a.engine.stats()["regions"] == 0
    ptr = a.engine.allocate_managed_buffer(1)
    assert a.engine.free_managed_buffer(ptr) == 0


def test_events(pair):
    a, b = pair
    start = connex_rs.now_ns()
    assert a.engine.connect(b.url) is None
    for side, other in (a, b), (b, a):
        joined = side.engine.wait_event(20_000)
        up = side.engine.wait_event(20_000)
        assert joined == {
            "type": "joined",
            "peer": other.engine.id,
            "ts_ns": joined["ts_ns"],
            "rejoin": False,
        }
        assert up == {"type": "up", "peer": other.engine.id, "ts_ns": up["ts_ns"]}
        assert start <= joined["ts_ns"] <= up["ts_ns"] <= connex_rs.now_ns()
    for _ in range(100):
        a.engine.connect(b.url)
    assert a.engine.wait_event(50) is None, "a connect to a linked peer is no news"
    b.engine.close()
    failed = a.engine.wait_event(20_000)
    assert failed == {
        "type": "failed",
        "peer": b.engine.id,
        "ts_ns": failed["ts_ns"],
        "status": -2,
        "reason": failed["reason"],
        "detail": failed["detail"],
        "established": True,
    }
    assert "closed by peer" in failed["reason"]
    assert isinstance(failed["detail"], str)


def test_disconnect(linked):
    a, b = linked
    assert a.engine.disconnect(b.engine.id) is None
    failed = b.event("failed")
    assert failed["established"] is True and "closed by peer" in failed["reason"]
    assert a.engine.wait_event(50) is None, "the caller gets no event"
    a.engine.connect(b.url)
    assert a.event("joined")["rejoin"] is True
    a.event("up")


def test_a_connect_that_does_not_come_up(pair):
    a, b = pair
    b.engine.close()
    a.engine.connect(b.url)
    failed = a.event("failed")
    assert failed["established"] is False and failed["status"] in (-2, -3)


def test_stats_has_its_counters(linked):
    a, b = linked
    stats = a.engine.stats()
    counters = (
        "eps_created eps_closed live_peers failures rejoins heartbeat_failures dropped_events "
        "regions region_bytes "
        "remote_rkeys inflight rma_ok rma_err rkey_fetches invalidations op_timeouts wakeups"
    )
    for name in counters.split():
        assert isinstance(stats[name], int), name
    assert stats["live_peers"] == 1 and stats["eps_created"] == 1
    [path] = stats["paths"]
    assert path["peer"] == b.url.split("#")[1]
    assert path["mode"] in ("requested", "one-sided")
    assert stats["transport"] in ("tcp", "ucx")


def test_context_manager():
    with connex_rs.Engine("m", 0, listen_ip="127.0.0.1") as engine:
        assert not engine.closed
    assert engine.closed


def test_urls_can_be_cut_and_put_together(pair):
    a, b = pair
    address, identity = b.url.split("#")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    here, there = a.buffer(8), b.buffer(8, b"together")
    assert a.engine.transfer_sync_read(f"{address}#{identity}", here, there, 8) == 0
    assert a.bytes(here, 8) == b"together"


def test_the_biggest_numbers_of_an_id(site):
    a = site(MAX, shard=MAX, replica=MAX)
    b = site(MAX - 1, shard=MAX, replica=MAX)
    here, there = a.buffer(8), b.buffer(8, b"numbers!")
    assert a.engine.transfer_sync_read(b.url, here, there, 8) == 0
    assert a.event("up")["peer"] == b.engine.id == (b.engine.id[0], MAX - 1, MAX, MAX)


def test_secret(site):
    secret = "correct horse battery"
    a, b, c = (
        site(0, secret=secret),
        site(1, secret=secret.encode()),
        site(2, secret=b"another secret here"),
    )
    here, there, elsewhere = a.buffer(8), b.buffer(8, b"secret!!"), c.buffer(8)
    assert a.engine.transfer_sync_read(b.url, here, there, 8) == 0
    assert a.bytes(here, 8) == b"secret!!"
    assert a.engine.transfer_sync_read(c.url, here, elsewhere, 8) == -2
