"""The whole pipeline: stage 0 here, the others in processes of their own."""

import os
import threading
import time
from dataclasses import dataclass

import torch
from connex.pp import Stage0Link

import connex_rs
import work
from endpoint import open_endpoint
from processes import IP, PATIENCE_S, ControlPlane, Lost, StageProcess, free_ports


class Wrong(RuntimeError):
    """A reply that is not what it must be."""


@dataclass
class StagePlace:
    """Who a stage is and where it listens: the same in every life."""

    stage: int
    replica: int
    port: int
    engine_port: int


@dataclass
class Settings:
    """What all stages of a pipeline share."""

    api: str
    events: str
    inflight: int

    @property
    def router(self):
        """The control plane, as the client's constructor wants it."""
        return self.api.removeprefix("tcp://")

    def environment(self, place):
        """The variables of a stage: those of this process and its own."""
        return {
            **os.environ,
            "CONNEX_PP_BACKEND": "connex-rs",
            "CONNEX_PP_INFLIGHT": str(self.inflight),
            "CONNEX_HOST_IP": IP,
            "CONNEX_RS_LOCAL_IP": IP,
            "CONNEX_RS_PORT": str(place.engine_port),
            "FRONT_ROUTER_API": self.api,
            "FRONT_ROUTER_EVENTS": self.events,
            "PIPELINE_REPLICA_IDX": str(place.replica),
            # Threads of torch that spin would only disturb on a small host.
            "OMP_NUM_THREADS": "1",
        }


class Pipeline:
    """Three stages with two replicas of the middle one."""

    def __init__(self, inflight, size, logs):
        self.size, self.logs = size, logs
        self.changed = threading.Condition()
        # Of stage 0: the peers that its links are up to, and for each that it lost the event and when it had acted on it.
        self.links, self.deaths = set(), {}
        self.number = self.replies = 0
        # (pid, reads) of every visit of a stage: never the same twice.
        self.visits = set()
        self.control = ControlPlane(logs)
        self.settings = Settings(self.control.api, self.control.events, inflight)
        seats = [(work.MIDDLE, 0), (work.MIDDLE, 1), (work.LAST, 0)]
        ports = iter(free_ports(2 * len(seats) + 2))
        self.places = [StagePlace(*seat, next(ports), next(ports)) for seat in seats]
        self.first = StagePlace(0, 0, next(ports), next(ports))
        self.stages, self.endpoint = {}, None

    def start(self):
        """Starts all of it; returns when every link is up."""
        for place in self.places:
            self.launch(place)
        for process in self.stages.values():
            process.wait_ready()
        os.environ.update(self.settings.environment(self.first))
        self.endpoint, self.engine = open_endpoint(
            0, self.first.port, self.settings.router, self.settings.inflight, self.told
        )
        self.client = Stage0Link(self.endpoint, max_healthy_attempts=5)
        self.wait_links()

    def launch(self, place):
        """Starts a process for this stage."""
        process = StageProcess(self.settings, place, self.logs)
        self.stages[place.stage, place.replica] = process

    def told(self, peer, event):
        """Stage 0's client has acted on a link that is up or lost."""
        with self.changed:
            if event["type"] == "up":
                self.links.add(peer)
            else:
                self.links.discard(peer)
                self.deaths.setdefault(peer, (event, time.monotonic()))
            self.changed.notify_all()

    def death(self, peer):
        """The event that said that the link to `peer` is lost, and when stage 0's client had acted on it."""
        with self.changed:
            if not self.changed.wait_for(lambda: peer in self.deaths, PATIENCE_S):
                raise Lost(f"stage 0 was not told of the death of {peer} within {PATIENCE_S} s")
            return self.deaths[peer]

    def check(self):
        """Raises Lost if a process ended that was not killed."""
        for process in [self.control, *self.stages.values()]:
            process.check()

    def wait_links(self):
        """Waits until stage 0 and the last stage have links to all others: the client routes around a replica, and is
        deaf to its death, until then."""
        last = self.stages[work.LAST, 0]
        middle = {(work.MIDDLE, 0), (work.MIDDLE, 1)}
        last.wait_until("its links were up", lambda: middle | {(0, 0)} <= last.links)
        with self.changed:
            if not self.changed.wait_for(
                lambda: middle | {(work.LAST, 0)} <= self.links, PATIENCE_S
            ):
                raise Lost(f"stage 0 has links to {sorted(self.links)} only, after {PATIENCE_S} s")

    def submit(self, hold=None):
        """Sends the next step, one that the process `hold` never answers; returns its two numbers, ours and the client's."""
        self.number += 1
        step = {
            "number": self.number,
            "hold": hold,
            "x": work.tensor(self.number, self.size),
            "path": [],
        }
        return self.number, self.client.submit(step)

    def wait(self, numbers):
        """The reply of a step: returns its path, and when it came."""
        number, corr = numbers
        try:
            reply = self.client.wait(corr)
            when = time.monotonic()
        finally:
            # A stage that ended by itself is the cause of whatever else went wrong.
            self.check()
        self.replies += 1
        self.verify(number, reply)
        return reply["path"], when

    def verify(self, number, reply):
        """Raises Wrong unless every byte is right and every stage read its input over connex-rs."""
        if reply["number"] != number or not torch.equal(
            reply["x"], work.expected(number, self.size)
        ):
            raise Wrong(f"step {number}: the reply is not the result: {reply}")
        if self.engine.stats()["rma_ok"] < self.replies:
            raise Wrong(f"step {number}: stage 0 did not read the reply over connex-rs")
        path = reply["path"]
        if [visit["stage"] for visit in path] != [work.MIDDLE, work.LAST]:
            raise Wrong(f"step {number} went through {path}")
        for visit in path:
            process = self.stages[visit["stage"], visit["replica"]]
            if visit["pid"] != process.pid:
                raise Wrong(
                    f"step {number} was answered by process {visit['pid']}, not by {process.pid}"
                )
            read = (visit["pid"], visit["reads"])
            if visit["reads"] == 0 or read in self.visits:
                raise Wrong(f"step {number}: stage {visit['stage']} did not read it over connex-rs")
            self.visits.add(read)

    def close(self):
        """Ends all of it."""
        for process in self.stages.values():
            process.end()
        if self.endpoint is not None:
            self.endpoint.close()
        self.control.end()

    def versions(self):
        """What was measured."""
        return {
            "connex_rs": connex_rs.__version__,
            "torch": torch.__version__,
            "transport": self.engine.stats()["transport"],
            "sentinel": self.engine.stats()["sentinel"],
        }
