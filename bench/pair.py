"""What the drivers have in common: arguments, the owner's process, repeating and timing, JSON.

A driver gives two functions. `own(length)` runs in a process of its own: it registers a buffer, returns what
the reader must know (JSON) and the buffer as a memoryview. `reader(offer, length)` returns an object with
`read(n)` and `write(n)`, blocking, and `buffer`, a memoryview of its side.
"""

import argparse
import json
import os
import subprocess
import sys
import time

CHUNK = bytes(range(251)) * 17


def contents(length, seed):
    """Known bytes; other seeds give others everywhere."""
    chunk = bytes(byte ^ seed for byte in CHUNK)
    return (chunk * (length // len(chunk) + 1))[:length]


def pages(length):
    """Page-aligned memory: a memoryview and its address. It lives as long as the process."""
    import ctypes
    import mmap

    memory = mmap.mmap(-1, length)
    view = memoryview(memory)
    return view, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def measure(op, call, size, args):
    """One row of figures, in the form of cxrma's JSON."""
    warm = time.perf_counter() + args.budget_ms / 10e3
    for _ in range(max(1, min(200, args.iterations // 10))):
        call(size)
        if time.perf_counter() > warm:
            break
    times = []
    end = time.perf_counter_ns() + args.budget_ms * 1_000_000
    while len(times) < args.iterations:
        before = time.perf_counter_ns()
        call(size)
        after = time.perf_counter_ns()
        times.append(after - before)
        if after > end and len(times) >= 5:
            break
    times.sort()

    def at(quantile):
        return times[min(len(times) - 1, int(quantile * len(times)))] / 1e3

    return {
        "measure": "latency",
        "op": op,
        "bytes": size,
        "count": len(times),
        "p50_us": at(0.5),
        "p99_us": at(0.99),
    }


def main(name, own, reader):
    """Runs a driver: starts this file a second time as the owner, measures, prints JSON."""
    parser = argparse.ArgumentParser(description=f"blocking reads and writes with {name}")
    parser.add_argument("--sizes", default="4096,65536,1048576,16777216,67108864")
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--budget-ms", type=int, default=2000)
    parser.add_argument("--own", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    # What libraries print belongs on standard error; our lines have the real standard output for themselves.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if args.own is not None:
        serve(own, args.own, out)
        return
    sizes = [int(size) for size in args.sizes.split(",")]
    owner = subprocess.Popen(
        [sys.executable, os.path.abspath(sys.argv[0]), "--own", str(max(sizes))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    rows = []
    try:
        side = reader(ask(owner, None), max(sizes))
        for size in sizes:
            ask(owner, {"fill": size})
            side.buffer[:size] = bytes(size)
            rows.append(measure("read", side.read, size, args))
            if side.buffer[:size] != contents(size, 7):
                raise SystemExit(f"{name}: {size} bytes were read wrong")
            side.buffer[:size] = contents(size, 9)
            rows.append(measure("write", side.write, size, args))
            if not ask(owner, {"check": size})["good"]:
                raise SystemExit(f"{name}: {size} bytes were written wrong")
    finally:
        owner.stdin.close()
        try:
            owner.wait(10)
        except subprocess.TimeoutExpired:
            owner.kill()
            owner.wait()
    print(
        json.dumps({"schema": "connex-bench/1", "name": name, "results": rows}),
        file=out,
        flush=True,
    )
    # Some libraries hang in their destructors when their peer is gone.
    os._exit(0)


def ask(owner, request):
    """Sends the owner a line, if there is one to send, and returns its answer."""
    if request is not None:
        owner.stdin.write(json.dumps(request) + "\n")
        owner.stdin.flush()
    line = owner.stdout.readline()
    if not line:
        raise SystemExit("the owner's process ended early")
    return json.loads(line)


def serve(own, length, out):
    """The owner's process: does what it is asked for until its input ends."""
    offer, buffer = own(length)
    print(json.dumps(offer), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "fill" in request:
            size = request["fill"]
            buffer[:size] = contents(size, 7)
            answer = {}
        else:
            size = request["check"]
            answer = {"good": buffer[:size] == contents(size, 9)}
            buffer[:size] = bytes(size)
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)
