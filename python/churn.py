#!/usr/bin/env python3
"""Kills and restarts a peer under one identity, again and again, against a live engine.

    python churn.py URL [--times N]      against an engine of yours
    python churn.py --self [--times N]   against one that this program starts: a survivor to look at

The peer is a Python process with an engine of its own, model `churn`, stage 1 by default. Each life
connects to the URL, moves a message,
and is ended with SIGKILL. At the end comes a table of what the survivor (with --self) and each life
saw.
"""

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import threading
import time

# Beside this file lies the package's source, without its native part: the installed package is wanted.
if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    sys.path.pop(0)

import connex_rs

# What one life may take to come up on a busy host.
PATIENCE_S = 60

# The number of open files is settled when it did not change for this long.
SETTLED_S = 0.5

LIFE = """
import sys, time
import connex_rs
url, ip, port, stage, transport = sys.argv[1:]
engine = connex_rs.Engine("churn", int(stage), listen_ip=ip, port=int(port), transport=transport)
begun = time.monotonic()
engine.connect(url)
while True:
    event = engine.wait_event(30_000)
    if event is None:
        sys.exit("no link within 30 s")
    if event["type"] == "failed":
        sys.exit("no link: " + event["reason"])
    if event["type"] == "up":
        break
engine.send_msg(event["peer"], b"alive")
print("up", (time.monotonic() - begun) * 1e3, engine.port, flush=True)
while True:
    engine.wait_event()
"""


class Survivor:
    """An engine that counts what it sees."""

    def __init__(self, options):
        self.engine = connex_rs.Engine(
            "churn", 0, listen_ip=options.ip, transport=options.transport, heartbeat_ms=1000
        )
        self.events = collections.Counter()
        self.reasons = collections.Counter()
        self.killed_at = None
        self.seen_ms = []
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        threading.Thread(target=self.drain, daemon=True).start()

    def watch(self):
        while not self.engine.closed:
            event = self.engine.wait_event()
            if event is None:
                continue
            with self.changed:
                kind = event["type"] + (" (rejoin)" if event.get("rejoin") else "")
                self.events[kind] += 1
                if event["type"] == "failed":
                    self.reasons[event["reason"]] += 1
                    if self.killed_at is not None:
                        self.seen_ms.append((event["ts_ns"] - self.killed_at) / 1e6)
                self.changed.notify_all()

    def drain(self):
        while not self.engine.closed:
            self.engine.recv_msg()

    def wait_for_failures(self, count):
        with self.changed:
            if not self.changed.wait_for(lambda: self.events["failed"] >= count, PATIENCE_S):
                sys.exit(
                    f"the survivor saw {self.events['failed']} deaths of {count} "
                    f"within {PATIENCE_S} s"
                )

    def close(self):
        self.engine.close()
        self.thread.join()


def settled_resources():
    """What this process holds once the last death is dealt with.

    A death is told before its sockets are closed, so a look right after it would count those too.
    """
    until = time.monotonic() + PATIENCE_S
    seen, since = resources(), time.monotonic()
    while time.monotonic() - since < SETTLED_S and time.monotonic() < until:
        time.sleep(SETTLED_S / 10)
        now = resources()
        if now["descriptors"] != seen["descriptors"]:
            since = time.monotonic()
        seen = now
    return seen


def resources():
    """Open files and resident memory of this process."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident_mb": round(resident / 1e6, 1),
    }


def live_and_die(url, options, port, survivor, count):
    """One life of the peer; returns how long it took to come up, and its port."""
    command = [
        sys.executable,
        "-c",
        LIFE,
        url,
        options.ip,
        str(port),
        str(options.stage),
        options.transport,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(PATIENCE_S, process.kill)
        timer.start()
        words = process.stdout.readline().split()
        timer.cancel()
        if len(words) != 3:
            process.kill()
            sys.exit(f"life {count + 1} of the peer did not come up; its last words are above")
        time.sleep(options.pause_ms / 1e3)
        if survivor:
            survivor.killed_at = connex_rs.now_ns()
        process.send_signal(signal.SIGKILL)
    if survivor:
        survivor.wait_for_failures(count + 1)
    return float(words[1]), int(words[2])


def median(values):
    return sorted(values)[len(values) // 2] if values else None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", help="the engine that the peer connects to")
    parser.add_argument(
        "--self",
        dest="own",
        action="store_true",
        help="start a survivor here and report what it sees",
    )
    parser.add_argument("--times", type=int, default=100, help="how many lives (default 100)")
    parser.add_argument("--ip", default="127.0.0.1", help="the address that the peer listens on")
    parser.add_argument("--port", type=int, default=0, help="its port; the first life's is kept")
    parser.add_argument("--stage", type=int, default=1, help="the stage of its identity")
    parser.add_argument(
        "--pause-ms", type=int, default=20, help="how long a life lasts once it is up"
    )
    parser.add_argument("--transport", default="auto", choices=["auto", "tcp", "ucx"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if (options.url is None) == (not options.own):
        parser.error("give a URL, or --self")
    if options.times < 1:
        parser.error("--times must be positive")

    survivor = Survivor(options) if options.own else None
    url = survivor.engine.local_url if survivor else options.url
    port, up_ms, before = options.port, [], None
    try:
        for count in range(options.times):
            took, port = live_and_die(url, options, port, survivor, count)
            up_ms.append(took)
            if before is None:
                before = settled_resources()
            if sys.stderr.isatty():
                print(f"\r{count + 1} of {options.times}", end="", file=sys.stderr, flush=True)
        report = {"lives": options.times, "up_ms": {"median": median(up_ms), "worst": max(up_ms)}}
        if survivor:
            report["survivor"] = {
                "events": dict(survivor.events),
                "reasons": dict(survivor.reasons),
                "kill_to_event_ms": {
                    "median": median(survivor.seen_ms),
                    "worst": max(survivor.seen_ms),
                },
                "after_the_first_life": before,
                "at_the_end": settled_resources(),
                "stats": survivor.engine.stats(),
            }
    finally:
        if survivor:
            survivor.close()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(
        "{lives} lives; connect to up: "
        "median {up_ms[median]:.1f} ms, worst {up_ms[worst]:.1f} ms".format(**report)
    )
    if survivor:
        seen = report["survivor"]
        print(
            "kill to event: median {median:.1f} ms, worst {worst:.1f} ms".format(
                **seen["kill_to_event_ms"]
            )
        )
        print("\nevents of the survivor")
        for name, number in sorted(seen["events"].items()):
            print(f"  {number:>7}  {name}")
        print("reasons")
        for name, number in sorted(seen["reasons"].items()):
            print(f"  {number:>7}  {name}")
        print(f"{'':24}{'after the first life':>22}{'at the end':>14}")
        for name in before:
            print(
                f"{name:24}{seen['after_the_first_life'][name]:>22}{seen['at_the_end'][name]:>14}"
            )
        for name in ("live_peers", "regions", "remote_rkeys", "inflight", "rejoins", "failures"):
            print(f"{name:24}{'':>22}{seen['stats'][name]:>14}")


if __name__ == "__main__":
    main()
