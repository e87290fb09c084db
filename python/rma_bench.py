#!/usr/bin/env python3
"""One-sided read latency and bandwidth, and step channels, from Python.

python rma_bench.py local --ip IP [--dev cuda:0 --peer-dev cuda:1]     owner and reader on this host
python rma_bench.py owner --ip IP [--dev cuda:0]                       then, on another host:
python rma_bench.py reader --ip IP --url URL --addr ADDR [--dev cuda:0]
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time

# Beside this file lies the package's source, without its native part: the installed package is wanted.
if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    sys.path.pop(0)

import connex_rs

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
# What one size may move, so that large ones take no longer than small ones; and the fewest reads
# that make a median.
BUDGET = 4 << 30
FEWEST = 20

# Steps of channels: their sizes, and how many are in flight.
STEPS = [64 << 10, 1 << 20, 16 << 20]
IN_FLIGHT = [1, 4]
CHANNEL = "rma-bench"
# Bits of a correlation number: the owner compares the contents, the owner answers. The rest is the step's number.
CHECK, ANSWER = 1 << 63, 1 << 62


def size(text):
    """`64K`, `1M`, or a number of bytes."""
    units = {"K": 10, "M": 20, "G": 30}
    try:
        unit = units.get(text[-1:].upper())
        value = int(text[:-1]) << unit if unit else int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4096, 64K or 16M")
    return value


def positive(text):
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be positive")
    return value


@contextlib.contextmanager
def memory(engine, device, length):
    """The address of `length` bytes that are registered: on the host, or on a GPU by way of torch
    or CuPy.
    """
    if device == "cpu":
        ptr = engine.allocate_managed_buffer(length)
        yield ptr
        engine.free_managed_buffer(ptr)
        return
    array, ptr = gpu_array(device, length)
    code = engine.register_memory(ptr, length)
    if code != 0:
        sys.exit(
            f"the memory of {device} cannot be registered: code {code}; "
            "`python -m connex_rs doctor` may know why"
        )
    yield ptr
    engine.unregister_memory(ptr)
    del array


def gpu_array(device, length):
    """`length` bytes on a device and their address."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdigit():
        sys.exit(f"--dev {device}: use cpu, cuda, or cuda:N")
    number = int(index or 0)
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None:
        if not torch.cuda.is_available() or number >= torch.cuda.device_count():
            sys.exit(f"There is no GPU {device} on this host.")
        array = torch.zeros(length, dtype=torch.uint8, device=f"cuda:{number}")
        torch.cuda.synchronize(number)
        return array, array.data_ptr()
    try:
        import cupy
    except ImportError:
        sys.exit(f"There is no GPU {device} that can be used: neither torch nor cupy is installed.")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        count = 0
    if number >= count:
        sys.exit(f"There is no GPU {device} on this host.")
    with cupy.cuda.Device(number) as chosen:
        array = cupy.zeros(length, dtype=cupy.uint8)
        chosen.synchronize()
    return array, array.data.ptr


def own(options, tell, wait):
    """The owner: offers memory until it is told to stop."""
    with connex_rs.Engine(
        "rma-bench", 0, listen_ip=options.ip, transport=options.transport
    ) as engine, memory(engine, options.peer_dev, max(options.sizes)) as ptr:
        threading.Thread(target=accept, args=(engine,), daemon=True).start()
        tell((engine.local_url, ptr))
        wait()


def accept(engine):
    """Accepts channels until the engine is closed; each is served by a thread of its own."""
    while True:
        try:
            channel = engine.accept_channel(CHANNEL)
        except RuntimeError:
            return
        threading.Thread(target=take, args=(engine, channel), daemon=True).start()


def take(engine, channel):
    """Takes the steps of a channel, in host memory, without a copy."""
    # A reader that is gone, or the end of this engine: nobody is left to be told.
    with contextlib.suppress(ConnectionError, RuntimeError):
        last = -1
        for step in channel:
            corr, number = step.corr, step.corr & ~(CHECK | ANSWER)
            good = number > last
            last = number
            if corr & CHECK:
                with step.memory(0) as memory:
                    good = good and memory == contents(len(memory), number)
            step.release()
            if corr & ANSWER:
                engine.send_msg(channel.peer, b"ok" if good else b"wrong bytes or order")


def read(options, url, addr):
    """The reader: one row of figures for each size."""
    rows = []
    with connex_rs.Engine(
        "rma-bench", 1, listen_ip=options.ip, transport=options.transport
    ) as engine, memory(engine, options.dev, max(options.sizes)) as here:
        begun = time.perf_counter()
        check(engine.transfer_sync_read(url, here, addr, min(options.sizes)))
        first = time.perf_counter() - begun
        for length in options.sizes:
            rows.append(measure(engine, options, url, here, addr, length))
        channels = [
            steps(engine, options, url, length, in_flight)
            for length in options.steps
            for in_flight in IN_FLIGHT
        ]
        path = engine.stats()["paths"]
    return {"first_read_ms": first * 1e3, "path": path, "rows": rows, "channels": channels}


def measure(engine, options, url, here, addr, length):
    count = max(FEWEST, min(options.count, BUDGET // length))
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        code = engine.transfer_sync_read(url, here, addr, length)
        times.append(time.perf_counter() - begun)
        check(code)
    times.sort()
    flying = []
    begun = time.perf_counter()
    for _ in range(count):
        if len(flying) == options.in_flight:
            flying.pop(0).wait()
        flying.append(engine.get_async(url, here, addr, length))
    for transfer in flying:
        transfer.wait()
    took = time.perf_counter() - begun
    return {
        "bytes": length,
        "count": count,
        "p50_us": times[count // 2] * 1e6,
        "p99_us": times[min(count - 1, count * 99 // 100)] * 1e6,
        "gb_s": length / times[count // 2] / 1e9,
        "streaming_gb_s": length * count / took / 1e9,
    }


def contents(length, number):
    """What step `number` holds."""
    block = bytes((i * 7 + number) % 251 for i in range(251))
    return (block * (length // 251 + 1))[:length]


def steps(engine, options, url, length, in_flight):
    """One row of figures of a channel."""
    count = max(FEWEST, min(options.count, BUDGET // length))
    number = 0
    # One slot more than is in flight: the owner's loop holds a step until it has the next.
    with engine.channel(url, CHANNEL, slots=in_flight + 1, slot_bytes=length) as channel:
        # Every slot once, compared.
        for _ in range(in_flight):
            channel.post([contents(length, number)], CHECK | ANSWER | number)
            number += 1
        for _ in range(in_flight):
            answer(engine)
        data = contents(length, 0)
        sent = []
        for _ in range(count if in_flight == 1 else 0):
            begun = time.perf_counter()
            channel.send([data], number)
            sent.append(time.perf_counter() - begun)
            number += 1
            channel.drain()
        answered, flying, transfers = [], [], []
        for _ in range(count):
            if len(flying) == in_flight:
                answer(engine)
                answered.append(time.perf_counter() - flying.pop(0))
            flying.append(time.perf_counter())
            channel.post([data], ANSWER | number)
            number += 1
        for begun in flying:
            answer(engine)
            answered.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        for _ in range(count):
            if len(transfers) == in_flight:
                transfers.pop(0).wait()
            transfers.append(channel.post([data], number))
            number += 1
        channel.drain()
        took = time.perf_counter() - begun
    answered.sort()
    sent.sort()
    return {
        "bytes": length,
        "in_flight": in_flight,
        "count": count,
        "sent_p50_us": sent[count // 2] * 1e6 if sent else None,
        "answered_p50_us": answered[count // 2] * 1e6,
        "answered_p99_us": answered[min(count - 1, count * 99 // 100)] * 1e6,
        "gb_s": length * count / took / 1e9,
    }


def answer(engine):
    """Waits for the owner's answer to a step."""
    message = engine.recv_msg(60_000)
    if message is None:
        sys.exit("the owner did not answer a step within 60 s")
    if message[1] != b"ok":
        sys.exit(f"a step arrived with {message[1].decode(errors='replace')}")


def check(code):
    if code != 0:
        sys.exit(
            f"a read gave code {code} "
            "(-1 other, -2 peer failed, -3 timed out, -4 invalid, -5 canceled)"
        )


def table(options, result):
    path = result["path"][0] if result["path"] else {"path": "?", "mode": "?"}
    print(
        f"{options.dev} <- {options.peer_dev} over {path['path']} ({path['mode']}); "
        f"first read {result['first_read_ms']:.1f} ms"
    )
    print(
        f"{'bytes':>10} {'reads':>7} {'p50 us':>10} {'p99 us':>10} {'GB/s':>8} "
        f"{f'GB/s, {options.in_flight} in flight':>18}"
    )
    for row in result["rows"]:
        print(
            f"{row['bytes']:>10} {row['count']:>7} {row['p50_us']:>10.1f} {row['p99_us']:>10.1f}"
            f" {row['gb_s']:>8.2f}"
            f" {row['streaming_gb_s']:>18.2f}"
        )
    print("step channels, host memory: sent until in place; answered when taken and released")
    print(
        f"{'bytes':>10} {'in flight':>10} {'sent p50 us':>12} {'answered p50':>13} {'p99 us':>10}"
        f" {'GB/s':>8}"
    )
    for row in result["channels"]:
        sent = "-" if row["sent_p50_us"] is None else f"{row['sent_p50_us']:.1f}"
        print(
            f"{row['bytes']:>10} {row['in_flight']:>10} {sent:>12}"
            f" {row['answered_p50_us']:>13.1f} {row['answered_p99_us']:>10.1f} {row['gb_s']:>8.2f}"
        )


def report(options, result):
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        table(options, result)


def owner_process(options, pipe):
    own(options, pipe.send, pipe.recv)


def local(options):
    # A fresh interpreter, not a fork: an engine does not survive one.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=owner_process, args=(options, theirs))
    process.start()
    theirs.close()
    try:
        url, addr = ours.recv()
    except EOFError:
        process.join()
        sys.exit(process.exitcode or 1)
    try:
        report(options, read(options, url, addr))
    finally:
        ours.send(None)
        process.join()


def owner(options):
    def tell(where):
        print(
            f"python {sys.argv[0]} reader --ip <its address> --url '{where[0]}' --addr {where[1]}",
            flush=True,
        )

    with contextlib.suppress(KeyboardInterrupt):
        own(options, tell, lambda: time.sleep(10**8))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    for name in ("local", "owner", "reader"):
        mode = modes.add_parser(name)
        mode.add_argument("--ip", required=True, help="the address to listen on")
        mode.add_argument("--transport", default="auto", choices=["auto", "tcp", "ucx"])
        mode.add_argument(
            "--sizes",
            type=size,
            nargs="+",
            default=SIZES,
            help="bytes to read at a time (default: 4K to 16M)",
        )
        if name != "owner":
            mode.add_argument(
                "--dev", default="cpu", help="where the reader's memory is: cpu, cuda:N"
            )
            mode.add_argument(
                "--count",
                type=positive,
                default=3000,
                help="reads of each size, fewer for large ones",
            )
            mode.add_argument(
                "--steps",
                type=size,
                nargs="*",
                default=STEPS,
                help="bytes of a channel's steps (default: 64K, 1M, 16M; nothing: no channels)",
            )
            mode.add_argument(
                "--in-flight", type=positive, default=4, help="reads under way when streaming"
            )
            mode.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "reader":
            mode.add_argument("--url", required=True)
            mode.add_argument("--addr", required=True, type=positive)
            mode.set_defaults(peer_dev="peer")
        else:
            mode.add_argument(
                "--dev" if name == "owner" else "--peer-dev",
                dest="peer_dev",
                default="cpu",
                help="where the owner's memory is",
            )
    options = parser.parse_args()
    if options.mode == "local":
        local(options)
    elif options.mode == "owner":
        owner(options)
    else:
        report(options, read(options, options.url, options.addr))


if __name__ == "__main__":
    main()
