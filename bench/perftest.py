"""Runs `ucx_perftest` for some tests and sizes and prints its medians as JSON, one way as it measures them.

`--bin` is the folder with the program; its libraries are found through LD_LIBRARY_PATH. `UCX_*` variables are passed through.
"""

import argparse
import json
import os
import socket
import subprocess
import time

TESTS = {"am": "ucp_am_lat", "put": "ucp_put_lat", "get": "ucp_get"}


def run(program, test, size, iterations):
    """The median of one test in microseconds, or None if this UCX does not have it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = [program, "-p", port]
    server = subprocess.Popen(common, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = [
        *common,
        "-t",
        TESTS[test],
        "-s",
        str(size),
        "-n",
        str(iterations),
        "-w",
        str(iterations // 10 + 1),
        "-f",
        "-v",
        "127.0.0.1",
    ]
    try:
        # The server needs a moment to listen; the client gives up at once.
        for _ in range(100):
            done = subprocess.run(client, capture_output=True, text=True, timeout=120)
            if done.returncode == 0 or server.poll() is not None:
                break
            time.sleep(0.05)
    finally:
        server.kill()
        server.wait()
    # Heads and figures, perhaps with UCX's own warnings before, between or after.
    rows = [line.split(",") for line in done.stdout.splitlines()]
    heads = next((row for row in rows if row[0] == "iterations"), [])
    figures = [row for row in rows if len(row) == len(heads) and row[0].strip().isdigit()]
    if done.returncode != 0 or not figures:
        raise SystemExit(f"{' '.join(client)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return dict(zip(heads, figures[-1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--tests", default="am,put,get")
    parser.add_argument("--sizes", default="4096,65536,1048576,16777216,67108864")
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--budget-ms", type=int, default=2000)
    args = parser.parse_args()
    rows = []
    for size in map(int, args.sizes.split(",")):
        # It counts and does not look at the clock: as many as fit the budget at 2 GB/s.
        affordable = int(args.budget_ms * 1e-3 / (size / 2e9 + 10e-6))
        iterations = max(10, min(args.iterations, affordable))
        for test in args.tests.split(","):
            figures = run(os.path.join(args.bin, "ucx_perftest"), test, size, iterations)
            rows.append(
                {
                    "measure": "one_way" if test != "get" else "latency",
                    "op": test,
                    "bytes": size,
                    "count": iterations,
                    "p50_us": float(figures["50.0_percentile_lat"]),
                }
            )
    print(json.dumps({"schema": "connex-bench/1", "name": "ucx_perftest", "results": rows}))


main()
