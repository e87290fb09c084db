"""Two processes move memory both ways, check every byte, and print how long it took.

    python demo_pair.py owner --ip 127.0.0.1            # prints its URL and the address of its memory
    python demo_pair.py reader --url URL --addr ADDR    # in a second process, here or on another host

The owner offers memory; the reader writes and reads it. `cargo xtask demo` runs both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time

import connex_rs

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]
CAPACITY = max(SIZES)
# At most this many transfers of one size, and this many seconds.
REPEATS = 200
BUDGET = 1.0
DIGEST_TIMEOUT_MS = 30_000


def pattern(size: int, seed: int) -> bytes:
    """Bytes that differ at every place and in every round."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(size)


def owner(ip: str) -> None:
    """Offers CAPACITY bytes and tells whoever asks what they hold, until a reader has come and gone."""
    engine = connex_rs.Engine("demo", 0, listen_ip=ip)
    memory = engine.allocate_managed_buffer(CAPACITY)
    print(json.dumps({"url": engine.local_url, "addr": memory}), flush=True)
    while True:
        message = engine.recv_msg(100)
        if message is not None:
            reader, size = message
            held = engine.read_bytes_from_buffer(memory, int(size))
            engine.send_msg(reader, hashlib.sha256(held).digest())
        event = engine.wait_event(0)
        if event is not None and event["type"] == "failed" and event["established"]:
            break
    engine.close()


def check(code: int, what: str) -> None:
    if code != 0:
        sys.exit(f"{what}: code {code}")


def measure(move) -> float:
    """The median time of one transfer in seconds."""
    times = []
    end = time.monotonic() + BUDGET
    while len(times) < 5 or (len(times) < REPEATS and time.monotonic() < end):
        start = time.perf_counter()
        code = move()
        times.append(time.perf_counter() - start)
        check(code, "transfer")
    return statistics.median(times)


def reader(ip: str, url: str, addr: int) -> None:
    """Writes, lets the owner tell what it has, reads back, compares, and measures."""
    engine = connex_rs.Engine("demo", 1, listen_ip=ip)
    local = engine.allocate_managed_buffer(CAPACITY)
    print(f"{'bytes':>12} {'write':>12} {'read':>12} {'write':>12} {'read':>12}")
    for round_, size in enumerate(SIZES):
        sent = pattern(size, round_)
        engine.write_bytes_to_buffer(local, sent, size)
        check(engine.transfer_sync_write(url, local, addr, size), f"write of {size} bytes")
        engine.send_msg(url, str(size).encode())
        answer = engine.recv_msg(DIGEST_TIMEOUT_MS)
        if answer is None or answer[1] != hashlib.sha256(sent).digest():
            sys.exit(f"write of {size} bytes: the owner holds something else")
        engine.write_bytes_to_buffer(local, bytes(size), size)
        check(engine.transfer_sync_read(url, local, addr, size), f"read of {size} bytes")
        if engine.read_bytes_from_buffer(local, size) != sent:
            sys.exit(f"read of {size} bytes: what came back differs")

        write = measure(lambda n=size: engine.transfer_sync_write(url, local, addr, n))
        read = measure(lambda n=size: engine.transfer_sync_read(url, local, addr, n))
        print(
            f"{size:>12} {write * 1e6:>9.1f} us {read * 1e6:>9.1f} us"
            f" {size / write / 1e9:>7.2f} GB/s {size / read / 1e9:>7.2f} GB/s"
        )
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=["owner", "reader"])
    parser.add_argument("--ip", default="127.0.0.1", help="address of this host to listen on")
    parser.add_argument("--url", help="reader: the owner's URL")
    parser.add_argument(
        "--addr", type=lambda text: int(text, 0), help="reader: the address of the owner's memory"
    )
    args = parser.parse_args()
    if args.role == "owner":
        owner(args.ip)
    elif args.url is None or args.addr is None:
        parser.error("a reader needs --url and --addr, which the owner prints")
    else:
        reader(args.ip, args.url, args.addr)


if __name__ == "__main__":
    main()
