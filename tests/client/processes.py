"""The other processes of the pipeline: the control plane and the later stages."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

IP = "127.0.0.1"
HERE = os.path.dirname(os.path.abspath(__file__))

# What a process may take for anything on a busy host.
PATIENCE_S = 120


class Lost(RuntimeError):
    """A process ended or kept silent where it should not have."""


taken = set()


def free_ports(count):
    """Ports that nobody listens at, below those that the kernel gives to connections: a stage that is restarted must
    find its port free. None is given twice."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    ports = []
    for port in random.sample(range(10_000, first), 2_000):
        with socket.socket() as probe:
            try:
                probe.bind((IP, port))
            except OSError:
                continue
        if port in taken:
            continue
        taken.add(port)
        ports.append(port)
        if len(ports) == count:
            return ports
    raise Lost(f"no {count} free ports between 10000 and {first}")


class Process:
    """A child that does not outlive its use. Its standard error goes to a file, every life of it to the same one;
    its standard output too, unless it `speaks`."""

    def __init__(self, name, command, environment, logs, speaks=False):
        self.name = name
        self.log = os.path.join(logs, f"{name}.log")
        self.expected_to_end = False
        with open(self.log, "a") as log:
            self.child = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if speaks else log,
                stderr=log,
                env=environment,
                text=True,
            )

    @property
    def pid(self):
        return self.child.pid

    def check(self):
        """Raises Lost if it has ended by itself."""
        status = self.child.poll()
        if status is not None and not self.expected_to_end:
            raise Lost(f"{self.name} ended with {status}: {self.log} says why")

    def kill(self):
        """Ends it at once; returns the time of that on the monotonic clock."""
        self.expected_to_end = True
        now = time.monotonic()
        os.kill(self.child.pid, signal.SIGKILL)
        return now

    def reap(self):
        """Waits until the kernel has let go of it."""
        self.child.wait(PATIENCE_S)
        self.child.stdin.close()

    def end(self):
        """Kills and reaps it, if that was not done."""
        if self.child.returncode is None:
            self.kill()
            self.reap()


class ControlPlane(Process):
    """The client's own front router."""

    def __init__(self, logs):
        ports = free_ports(2)
        self.api, self.events = (f"tcp://{IP}:{port}" for port in ports)
        command = [os.path.join(HERE, "control.py"), self.api, self.events]
        super().__init__("front-router", command, dict(os.environ), logs)
        for port in ports:
            self.wait_listening(port)

    def wait_listening(self, port):
        """Waits until it takes connections."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.check()
            try:
                return socket.create_connection((IP, port), PATIENCE_S).close()
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise Lost(f"{self.name} does not listen after {PATIENCE_S} s") from None
                time.sleep(0.05)


class StageProcess(Process):
    """A later stage: `stage.py`, and what it says."""

    def __init__(self, settings, place, logs):
        self.stage, self.replica = place.stage, place.replica
        self.changed = threading.Condition()
        # The last that it said of each kind, and the peers that its links are up to.
        self.said, self.links = {}, set()
        command = [
            os.path.join(HERE, "stage.py"),
            *map(str, (place.stage, place.replica, place.port)),
        ]
        command += [settings.router, str(settings.inflight)]
        name = f"stage-{place.stage}-{place.replica}"
        super().__init__(name, command, settings.environment(place), logs, speaks=True)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.child.stdout:
            if not line.endswith("\n"):
                break  # Killed in the middle of it.
            said = json.loads(line)
            with self.changed:
                self.said.update(said)
                if "event" in said:
                    change = self.links.add if said["event"] == "up" else self.links.discard
                    change(tuple(said["peer"]))
                self.changed.notify_all()
        with self.changed:
            self.changed.notify_all()

    def wait_until(self, what, condition):
        """Waits until `condition()` holds, which looks at what this stage said."""
        deadline = time.monotonic() + PATIENCE_S
        with self.changed:
            while not condition():
                if self.child.poll() is not None and not self.reader.is_alive():
                    fell_back = self.said.get("fell_back")
                    raise Lost(fell_back or f"{self.name} ended before {what}: {self.log} says why")
                if time.monotonic() > deadline:
                    raise Lost(
                        f"{self.name}: {what} did not come within {PATIENCE_S} s: {self.log}"
                    )
                self.changed.wait(0.1)

    def wait_ready(self):
        self.wait_until("it was ready", lambda: "ready" in self.said)

    def touch(self, ballast):
        """Makes it hold `ballast` bytes of memory."""
        self.child.stdin.write(json.dumps({"ballast": ballast}) + "\n")
        self.child.stdin.flush()
        self.wait_until(
            f"{ballast} bytes were touched", lambda: self.said.get("ballast") == ballast
        )
