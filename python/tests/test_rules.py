"""The rules of the surface: refusals, codes and exceptions, registration, what happens after
close.
"""

import ctypes
import os
import socket
import threading
import time

import pytest

import connex_rs

BAD_URLS = [
    "",
    "nonsense",
    "127.0.0.1:1",
    "127.0.0.1:0#m|0|0|0",
    "127.0.0.1:1#m|0|0",
    "127.0.0.1:1#m|-1|0|0",
    "::1:5#m|0|0|0",
]
# A wrong value, and what an asynchronous method raises for it.
WRONG_WORDS = [
    (-1, ValueError),
    (2**64, ValueError),
    (10**5000, ValueError),
    (1.5, TypeError),
    ("1", TypeError),
    (None, TypeError),
    ([], TypeError),
]
WRONG_TIMEOUTS = [(-1, ValueError), (2**64, ValueError), (0.5, TypeError), ("1", TypeError)]


@pytest.fixture
def ready(pair):
    a, b = pair
    a.here, b.there = a.buffer(4096), b.buffer(4096)
    return a, b


def brief(value):
    """The name of a parameter: not every integer has a decimal form."""
    return "huge" if isinstance(value, int) and value > 2**70 else repr(value)


# ---- malformed arguments -------------------------------------------------------------------------


def methods(a, b):
    """The methods that take (url, ptr, ptr, length)."""
    e = a.engine
    args = {"url": b.url, "first": a.here, "second": b.there, "length": 64, "timeout_ms": 20_000}
    sync = [e.transfer_sync_read, e.transfer_sync_write]
    later = [e.get_async, e.put_async]
    return args, sync, later


@pytest.mark.parametrize("name", ["first", "second", "length"])
@pytest.mark.parametrize("value, raised", WRONG_WORDS, ids=brief)
def test_wrong_words(ready, name, value, raised):
    args, sync, later = methods(*ready)
    args[name] = value
    for call in sync:
        assert call(*args.values()) == -4
    for call in later:
        with pytest.raises(raised):
            call(*args.values())


@pytest.mark.parametrize("value, raised", WRONG_TIMEOUTS, ids=brief)
def test_wrong_timeouts(ready, value, raised):
    a, b = ready
    args, sync, later = methods(a, b)
    args["timeout_ms"] = value
    for call in sync:
        assert call(*args.values()) == -4
    for call in later:
        with pytest.raises(raised, match="timeout_ms"):
            call(*args.values())
    transfer = a.engine.get_async(b.url, a.here, b.there, 1)
    for call in (
        a.engine.wait_event,
        a.engine.recv_msg,
        transfer.wait,
        lambda t: a.engine.send_msg(b.url, b"", t),
    ):
        with pytest.raises(raised, match="timeout_ms"):
            call(value)


@pytest.mark.parametrize("timeout", [2**32, 2**63, 2**64 - 1])
def test_huge_timeouts_are_long(ready, timeout):
    a, b = ready
    assert a.engine.transfer_sync_read(b.url, a.here, b.there, 64, timeout) == 0
    assert a.engine.get_async(b.url, a.here, b.there, 64, timeout).wait(timeout) is True
    a.engine.send_msg(b.url, b"x", timeout)
    assert b.engine.recv_msg(timeout) == (a.engine.id, b"x")
    assert a.engine.wait_event(timeout)["type"] == "joined"


@pytest.mark.parametrize("url", BAD_URLS)
def test_wrong_urls(ready, url):
    a, b = ready
    args, sync, later = methods(a, b)
    args["url"] = url
    for call in sync:
        assert call(*args.values()) == -4
    for call in [lambda *_: a.engine.connect(url), lambda *_: a.engine.send_msg(url, b""), *later]:
        with pytest.raises(ValueError, match="URL"):
            call(*args.values())


@pytest.mark.parametrize("url", [None, 5, b"127.0.0.1:1#m|0|0|0", []])
def test_urls_of_the_wrong_type(ready, url):
    a, b = ready
    args, sync, later = methods(a, b)
    args["url"] = url
    for call in sync:
        assert call(*args.values()) == -4
    for call in [lambda *_: a.engine.connect(url), *later]:
        with pytest.raises(TypeError, match="url"):
            call(*args.values())
    for call in a.engine.put_chain, a.engine.get_many, a.engine.put_many:
        with pytest.raises(TypeError, match="url"):
            call(url, [(a.here, b.there, 8)])


def test_text_that_no_encoding_has(ready):
    a, b = ready
    assert a.engine.transfer_sync_read("\ud800", a.here, b.there, 8) == -4
    with pytest.raises(ValueError):
        a.engine.connect("\ud800")


def test_the_wrong_number_of_arguments(ready):
    a, b = ready
    with pytest.raises(TypeError):
        a.engine.transfer_sync_read(b.url, a.here, b.there)
    with pytest.raises(TypeError):
        a.engine.connect()
    with pytest.raises(TypeError):
        a.engine.get_async(b.url, a.here, b.there, 8, colour="red")


@pytest.mark.parametrize(
    "ranges, raised",
    [
        (None, TypeError),
        (5, TypeError),
        ([5], TypeError),
        ([None], TypeError),
        ([(1, 2)], ValueError),
        ([(1, 2, 3, 4)], ValueError),
        ([(1, -2, 3)], ValueError),
        ([("1", 2, 3)], TypeError),
    ],
    ids=brief,
)
def test_wrong_ranges(ready, ranges, raised):
    a, b = ready
    for call in a.engine.put_chain, a.engine.get_many, a.engine.put_many:
        with pytest.raises(raised):
            call(b.url, ranges)


def test_an_iterator_that_raises(ready):
    a, b = ready

    def ranges():
        yield (a.here, b.there, 8)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        a.engine.put_many(b.url, ranges())


def test_an_empty_chain(ready):
    a, b = ready
    with pytest.raises(ValueError, match="chain"):
        a.engine.put_chain(b.url, [])


@pytest.mark.parametrize("data", [None, 5, "text", [1, 2], object()], ids=brief)
def test_messages_that_are_not_bytes(ready, data):
    a, b = ready
    with pytest.raises(TypeError, match="bytes-like"):
        a.engine.send_msg(b.url, data)
    with pytest.raises(TypeError, match="bytes-like"):
        a.engine.put_signal(b.url, a.here, b.there, 8, data)
    assert a.engine.write_bytes_to_buffer(a.here, data, 1) == -4


def test_a_message_that_is_too_long(ready):
    a, b = ready
    with pytest.raises(ValueError, match="67108864"):
        a.engine.send_msg(b.url, bytes((64 << 20) + 1))


@pytest.mark.parametrize(
    "peer, raised",
    [
        (("m", 0, 0), ValueError),
        (("m", 0, 0, -1), ValueError),
        (("m", 0, 0, 2**32), ValueError),
        (("", 0, 0, 0), ValueError),
        (("a|b", 0, 0, 0), ValueError),
        ((5, 0, 0, 0), TypeError),
        (("m", "0", 0, 0), TypeError),
        (5, TypeError),
        (None, TypeError),
    ],
    ids=brief,
)
def test_wrong_ids(site, peer, raised):
    a = site()
    with pytest.raises(raised):
        a.engine.disconnect(peer)
    with pytest.raises(raised):
        a.engine.send_msg(peer, b"")


def test_an_id_without_a_link(site):
    a = site()
    with pytest.raises(ConnectionError) as caught:
        a.engine.send_msg(("m", 9, 9, 9), b"")
    assert caught.value.code == -2


ENGINES = [
    ({"model": ""}, ValueError, "model"),
    ({"model": "a#b"}, ValueError, "model"),
    ({"model": 5}, TypeError, "model"),
    ({"stage": -1}, ValueError, "stage"),
    ({"stage": 2**32}, ValueError, "stage 4294967296"),
    ({"shard": "x"}, TypeError, "shard"),
    ({"replica": 1.0}, TypeError, "replica"),
    ({"port": 65536}, ValueError, "port"),
    ({"port": -1}, ValueError, "port"),
    ({"listen_ip": 5}, TypeError, "listen_ip"),
    ({"listen_ip": "not an address"}, ValueError, "listen_ip"),
    ({"advertise_ip": "0.0.0.0"}, ValueError, "advertise_ip"),
    ({"heartbeat_ms": -5}, ValueError, "heartbeat_ms"),
    ({"heartbeat_ms": 100, "heartbeat_timeout_ms": 50}, ValueError, "heartbeat"),
    ({"heartbeat_timeout_ms": 50}, ValueError, "heartbeat_ms"),
    ({"spin_us": -1}, ValueError, "spin_us"),
    ({"transport": "pigeon"}, ValueError, "pigeon"),
    ({"transport": 7}, TypeError, "transport"),
    ({"secret": b"short"}, ValueError, "secret"),
    ({"secret": 5}, TypeError, "secret"),
    ({"sentinel": "yes"}, TypeError, "sentinel"),
    ({"stall_ms": 5}, ValueError, "stall"),
    ({"stall_ms": -1}, ValueError, "stall_ms"),
]


@pytest.mark.parametrize("options, raised, text", ENGINES, ids=brief)
def test_engines_that_cannot_be(options, raised, text):
    options = {"model": "m", "stage": 0, "listen_ip": "127.0.0.1", **options}
    with pytest.raises(raised, match=text):
        connex_rs.Engine(**options)


def test_an_address_that_is_not_the_hosts():
    with pytest.raises((RuntimeError, ValueError), match=r"203\.0\.113\.77"):
        connex_rs.Engine("m", 0, listen_ip="203.0.113.77")


def test_the_environment_is_read_when_an_engine_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("CONNEX_RS_TRANSPORT", "pigeon")
    with pytest.raises(ValueError, match="CONNEX_RS_TRANSPORT=pigeon"):
        connex_rs.Engine("m", 0, listen_ip="127.0.0.1")
    connex_rs.Engine("m", 0, listen_ip="127.0.0.1", transport="tcp").close()
    monkeypatch.setenv("CONNEX_RS_TRANSPORT", "tcp")
    with connex_rs.Engine("m", 0, listen_ip="127.0.0.1") as engine:
        assert engine.stats()["transport"] == "tcp"
    secret = tmp_path / "secret"
    monkeypatch.setenv("CONNEX_RS_SECRET_FILE", str(secret))
    with pytest.raises(ValueError, match=f"CONNEX_RS_SECRET_FILE={secret}"):
        connex_rs.Engine("m", 0, listen_ip="127.0.0.1")
    secret.write_bytes(b"from the file: 0123456789\n")
    options = {"listen_ip": "127.0.0.1"}
    with connex_rs.Engine("m", 0, **options) as a:
        with connex_rs.Engine("m", 1, secret="from the file: 0123456789", **options) as b:
            a.send_msg(b.local_url, b"the newline does not count", 20_000)
            assert b.recv_msg(20_000) is not None
        c = connex_rs.Engine("m", 2, secret="an argument wins over it", **options)
        with c, pytest.raises(ConnectionError):
            a.send_msg(c.local_url, b"", 20_000)


# ---- registration --------------------------------------------------------------------------------


def test_registration(ready):
    a, b = ready
    e = a.engine
    region = bytearray(os.urandom(4096))
    ptr = ctypes.addressof((ctypes.c_char * len(region)).from_buffer(region))
    before = e.stats()["regions"]
    assert e.register_memory(ptr, 4096) == 0
    assert e.register_memory(ptr, 4096) == -4, "the same start twice"
    assert e.register_memory(ptr, 100) == -4, "the same start twice, whatever the length"
    assert e.register_memory(ptr + 100, 100) == 0, "overlap is allowed"
    assert e.stats()["regions"] == before + 2
    assert b.engine.transfer_sync_read(a.url, b.there, ptr + 10, 4000) == 0
    assert b.bytes(b.there, 4000) == bytes(region[10:4010])
    assert e.unregister_memory(ptr + 100) == 0
    assert b.engine.transfer_sync_read(a.url, b.there, ptr + 90, 200) == 0, (
        "the outer one still holds it"
    )
    assert e.unregister_memory(ptr + 100) == -4, "unknown by now"
    assert e.unregister_memory(ptr + 8) == -4, "by the address that it was registered at"
    assert e.unregister_memory(ptr) == 0
    assert b.engine.transfer_sync_read(a.url, b.there, ptr + 10, 4000) == -4
    assert e.stats()["regions"] == before


@pytest.mark.parametrize(
    "ptr, length",
    [(0, 10), (4096, 0), (2**64 - 10, 100), (-1, 10), (4096, -1), ("x", 1), (1, None)],
)
def test_registrations_that_cannot_be(site, ptr, length):
    assert site().engine.register_memory(ptr, length) == -4


@pytest.mark.parametrize("ptr", [0, 12345, -1, 2**64, "x", None])
def test_unregistering_what_is_not_there(site, ptr):
    a = site()
    assert a.engine.unregister_memory(ptr) == -4
    assert a.engine.free_managed_buffer(ptr) == -4


@pytest.mark.parametrize("size", [0, -1, 2**62, 2**63, 2**64 - 1, 2**64, "x", None])
def test_buffers_that_cannot_be(site, size):
    with pytest.raises((MemoryError, RuntimeError, ValueError, TypeError)):
        site().engine.allocate_managed_buffer(size)


def test_copies_that_cannot_be(site):
    a = site()
    ptr = a.buffer(64)
    for bad in (
        (0, b"x", 1),
        (ptr, b"x", 2),
        (ptr, b"x", -1),
        (2**64 - 1, b"xx", 2),
        (-1, b"x", 1),
        ("x", b"x", 1),
    ):
        assert a.engine.write_bytes_to_buffer(*bad) == -4
    for bad, raised in (
        ((0, 1), ValueError),
        ((-1, 1), ValueError),
        ((2**64 - 1, 2), ValueError),
        ((ptr, "x"), TypeError),
    ):
        with pytest.raises(raised):
            a.engine.read_bytes_from_buffer(*bad)
    with pytest.raises((ValueError, MemoryError)):
        a.engine.read_bytes_from_buffer(ptr, 2**62)


# ---- codes ---------------------------------------------------------------------------------------


def test_ranges_that_the_peer_refuses(ready):
    a, b = ready
    e = a.engine
    here, gone = a.buffer(8192), b.buffer(4096)
    b.engine.free_managed_buffer(gone)
    there = b.there
    refused = [
        (there, 4097),
        (there + 1, 4096),
        (there - 1, 16),
        (there + 4096, 1),
        (64, 8),
        (gone, 8),
        (2**64 - 8, 64),
    ]
    for ptr, length in refused:
        assert e.transfer_sync_read(b.url, here, ptr, length) == -4
        assert e.transfer_sync_write(b.url, here, ptr, length) == -4
        for start in e.get_async, e.put_async:
            with pytest.raises(ValueError) as caught:
                start(b.url, here, ptr, length).wait()
            assert caught.value.code == -4
        assert e.transfer_sync_read(b.url, here, there, 4096) == 0, "the connection goes on"
    assert e.stats()["eps_created"] == 1, "no refusal cost the connection"


def test_a_chain_ends_at_a_bad_element(ready):
    a, b = ready
    b.engine.write_bytes_to_buffer(b.there, bytes(4096), 4096)
    a.engine.write_bytes_to_buffer(a.here, b"\x01" * 4096, 4096)
    chain = [(a.here, b.there, 64), (a.here, 64, 64), (a.here, b.there + 128, 8)]
    with pytest.raises(ValueError, match="element 1"):
        a.engine.put_chain(b.url, chain).wait()
    assert a.engine.transfer_sync_read(b.url, a.here, b.there, 4096) == 0
    assert a.bytes(a.here + 128, 8) == bytes(8), "the flag was never written"


def test_a_local_range_that_leaves_its_region(ready):
    a, b = ready
    assert a.engine.transfer_sync_read(b.url, a.here + 4090, b.there, 64) == -4
    assert a.engine.transfer_sync_write(b.url, a.here + 4090, b.there, 64) == -4
    with pytest.raises(ValueError, match="leave"):
        a.engine.get_async(b.url, a.here + 4090, b.there, 64).wait()


def test_local_memory_need_not_be_registered(ready):
    a, b = ready
    b.engine.write_bytes_to_buffer(b.there, b"unregistered", 12)
    mine = ctypes.create_string_buffer(12)
    assert a.engine.transfer_sync_read(b.url, ctypes.addressof(mine), b.there, 12) == 0
    assert mine.raw == b"unregistered"


def test_null_pointers(ready):
    a, b = ready
    assert a.engine.transfer_sync_read(b.url, 0, b.there, 8) == -4
    assert a.engine.transfer_sync_read(b.url, a.here, 0, 8) == -4
    with pytest.raises(ValueError, match="null"):
        a.engine.put_async(b.url, a.here, 0, 8).wait()


def test_nothing_to_move(ready):
    a, b = ready
    assert a.engine.transfer_sync_read(b.url, 0, 0, 0) == 0
    assert a.engine.transfer_sync_write(b.url, a.here, b.there, 0) == 0
    assert a.event("up")["peer"] == b.engine.id, "0 means that the link is up"
    b.engine.close()
    a.event("failed")
    assert a.engine.transfer_sync_read(b.url, 0, 0, 0) == -2


def test_the_engine_itself_is_no_peer(ready):
    a, _ = ready
    assert a.engine.transfer_sync_read(a.url, a.here, a.here, 8) == -4


def test_a_peer_that_is_somebody_else(ready):
    a, b = ready
    wrong = b.url.rsplit("|", 1)[0] + "|99"
    assert a.engine.transfer_sync_read(wrong, a.here, b.there, 8) == -2
    with pytest.raises(ConnectionError):
        a.engine.get_async(wrong, a.here, b.there, 8).wait()
    with pytest.raises(ConnectionError):
        a.engine.send_msg(wrong, b"", 20_000)


def test_a_peer_that_is_gone(ready):
    a, b = ready
    assert a.engine.transfer_sync_read(b.url, a.here, b.there, 8) == 0
    b.engine.close()
    a.event("failed")
    assert a.engine.transfer_sync_read(b.url, a.here, b.there, 8) == -2
    with pytest.raises(ConnectionError) as caught:
        a.engine.put_async(b.url, a.here, b.there, 8).wait()
    assert caught.value.code == -2
    with pytest.raises(ConnectionError):
        a.engine.send_msg(b.engine.id, b"")


def test_time_runs_out(ready, silent_port):
    a, b = ready
    url = f"127.0.0.1:{silent_port}#silent|0|0|0"
    start = time.monotonic()
    assert a.engine.transfer_sync_read(url, a.here, b.there, 8, 200) in (-3, -2)
    with pytest.raises((TimeoutError, ConnectionError)):
        a.engine.get_async(url, a.here, b.there, 8, 200).wait()
    with pytest.raises((TimeoutError, ConnectionError)):
        a.engine.send_msg(url, b"", 200)
    assert time.monotonic() - start < 20


@pytest.fixture
def silent_port():
    """A port that accepts and never speaks."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield server.getsockname()[1]


def test_wait_polls_and_times_out(ready, silent_port):
    a, b = ready
    url = f"127.0.0.1:{silent_port}#silent|0|0|0"
    transfer = a.engine.get_async(url, a.here, b.there, 8, 60_000)
    assert transfer.done() is False
    assert transfer.wait(0) is False
    start = time.monotonic()
    assert transfer.wait(150) is False
    assert time.monotonic() - start >= 0.15
    assert "running" in repr(transfer)


def test_polling_does_not_wait(site):
    a = site()
    start = time.monotonic()
    for _ in range(100):
        assert a.engine.wait_event(0) is None
        assert a.engine.recv_msg(0) is None
    assert time.monotonic() - start < 5
    start = time.monotonic()
    assert a.engine.wait_event(120) is None
    assert a.engine.recv_msg(120) is None
    assert time.monotonic() - start >= 0.24


def test_a_slow_receiver_pushes_back(linked):
    a, b = linked
    sent = 0
    with pytest.raises(TimeoutError) as caught:
        for _ in range(1000):
            a.engine.send_msg(b.engine.id, bytes(1 << 20), 300)
            sent += 1
    assert caught.value.code == -3
    assert 1 <= sent < 100
    here, there = a.buffer(64), b.buffer(64)
    assert a.engine.transfer_sync_read(b.url, here, there, 64) == 0, (
        "messages that wait delay nothing else"
    )
    assert a.engine.stats()["failures"] == 0, "and the link stays"
    received = 0
    while b.engine.recv_msg(500) is not None:
        received += 1
    assert received == sent
    a.engine.send_msg(b.engine.id, b"again", 20_000)
    assert b.engine.recv_msg(20_000) == (a.engine.id, b"again")


# ---- close ---------------------------------------------------------------------------------------


def test_after_close(ready):
    a, b = ready
    e = a.engine
    assert e.transfer_sync_read(b.url, a.here, b.there, 8) == 0
    started = time.monotonic()
    e.close()
    e.close()
    assert time.monotonic() - started < 5
    assert e.closed
    assert e.transfer_sync_read(b.url, 4096, b.there, 8) == -5
    assert e.transfer_sync_write(b.url, 4096, b.there, 8) == -5
    later = [
        e.get_async(b.url, 4096, b.there, 8),
        e.put_async(b.url, 4096, b.there, 8),
        e.put_signal(b.url, 4096, b.there, 8, b"x"),
        e.put_chain(b.url, [(4096, b.there, 8)]),
        e.get_many(b.url, [(4096, b.there, 8)]),
        e.put_many(b.url, [(4096, b.there, 8)]),
    ]
    for transfer in later:
        assert transfer.done() is True
        for timeout in 0, None:
            with pytest.raises(RuntimeError, match=r"^canceled") as caught:
                transfer.wait(timeout)
            assert caught.value.code == -5
    for call in (
        lambda: e.send_msg(b.url, b""),
        lambda: e.send_msg(b.engine.id, b""),
        lambda: e.connect(b.url),
        lambda: e.allocate_managed_buffer(64),
    ):
        with pytest.raises(RuntimeError, match=r"^canceled"):
            call()
    assert e.wait_event() is None
    assert e.recv_msg() is None
    assert e.free_managed_buffer(a.here) == 0
    assert e.free_managed_buffer(12345) == 0
    assert e.unregister_memory(12345) == 0
    assert e.stats()["live_peers"] == 0
    assert e.id and e.local_url and e.port


def test_malformed_arguments_stay_malformed_after_close(site):
    a = site()
    a.engine.close()
    with pytest.raises(ValueError):
        a.engine.connect("nonsense")
    with pytest.raises(TypeError):
        a.engine.get_async(5, 1, 1, 1)
    assert a.engine.transfer_sync_read("nonsense", 1, 1, 1) == -4


def test_close_wakes_all_waiters(ready, silent_port):
    a, b = ready
    e = a.engine
    url = f"127.0.0.1:{silent_port}#silent|0|0|0"
    ended = {}
    transfer = e.get_async(url, a.here, b.there, 8, 60_000)

    def canceled():
        with pytest.raises(RuntimeError, match=r"^canceled"):
            transfer.wait()
        return "canceled"

    waits = {
        "wait_event": e.wait_event,
        "recv_msg": e.recv_msg,
        "wait": canceled,
        "read": lambda: e.transfer_sync_read(url, a.here, b.there, 8, 60_000),
    }
    threads = [
        threading.Thread(target=lambda name=name, call=call: ended.setdefault(name, call()))
        for name, call in waits.items()
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    e.close()
    for thread in threads:
        thread.join(20)
    assert time.monotonic() - started < 5
    assert ended == {"wait_event": None, "recv_msg": None, "wait": "canceled", "read": -5}


def test_dropping_an_engine_closes_it(site):
    a = site()
    b = connex_rs.Engine(
        a.engine.id[0], 1, listen_ip="127.0.0.1", transport=a.engine.stats()["transport"]
    )
    b.connect(a.url)
    a.event("up")
    del b
    assert a.event("failed")["established"] is True
