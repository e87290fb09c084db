"""A pipeline of three processes that moves arrays through step channels; the middle one is killed and restarted.

    source (stage 0) --activations--> middle (stage 1) --results--> sink (stage 2)

The program starts itself once for each stage, kills the middle stage when a third of the steps is through, and starts it
again under the same identity and address. No step is lost: the middle releases a step only when its result is in the
sink's memory, and the source sends again what had not been released when its channel failed. The sink verifies every
result and drops those that come twice. The exit code is 0 only if every result was right.

    python python/examples/pipeline.py
"""

import array
import subprocess
import sys
import time
from collections import deque

import connex_rs

STEPS = 150
VALUES = 4096
RING = {"slots": 4, "slot_bytes": 64 << 10}

# Ends a stage that hangs.
PATIENCE_MS = 30_000


# ---- the parent ----------------------------------------------------------------------------------


class Stage:
    """A stage in its own process; killed at the end of the `with` block."""

    def __init__(self, name, *arguments):
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-u", __file__, name, *arguments],
            stdout=subprocess.PIPE,
            universal_newlines=True,
        )

    def says(self, word):
        """The rest of its next line that starts with `word`. Other lines are shown."""
        for line in self.process.stdout:
            if line.startswith(word):
                return line[len(word) :].strip()
            print(f"{self.name}: {line.rstrip()}")
        raise SystemExit(f"failed: {self.name} ended before it said {word!r}")

    def finish(self):
        for line in self.process.stdout:
            print(f"{self.name}: {line.rstrip()}")
        if self.process.wait() != 0:
            raise SystemExit(f"failed: {self.name} ended with {self.process.returncode}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def pipeline():
    begin = time.monotonic()
    with Stage("sink") as sink_stage:
        sink_url = sink_stage.says("url")
        with Stage("middle", "0", sink_url) as doomed:
            middle_url = doomed.says("url")
            source_stage = Stage("source", middle_url)
            sink_stage.says("a third")
        with source_stage:
            killed = time.monotonic()
            print("middle killed")
            port = middle_url.split("#")[0].rpartition(":")[2]
            with Stage("middle", port, sink_url) as middle_stage:
                if middle_stage.says("url") != middle_url:
                    raise SystemExit("failed: the middle stage did not come back at its address")
                sink_stage.says("first result of the new middle")
                after = (time.monotonic() - killed) * 1000
                print(f"middle restarted: next result {after:.0f} ms after the kill")
                source_stage.finish()
                middle_stage.finish()
                sink_stage.finish()
    print(f"{STEPS} results verified in {time.monotonic() - begin:.1f} s")


# ---- the stages ----------------------------------------------------------------------------------


def engine(stage, port=0):
    return connex_rs.Engine("demo", stage, listen_ip="127.0.0.1", port=port)


def inputs(corr):
    """The arrays of a step: activations and the position of its token."""
    return array.array("d", range(corr, corr + VALUES)), array.array("q", [corr])


def compute(activations, position):
    """What the middle stage computes."""
    return array.array("d", (x * 2.0 + position for x in activations))


def opened(own, url, name):
    """The link to the next stage, opened anew for as long as that stage is away."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while True:
        sender = own.channel(url, name, **RING)
        try:
            sender.wait_open(PATIENCE_MS)
            return sender
        except ConnectionError:
            if time.monotonic() > end:
                raise
        # Nobody listens yet: the stage is being restarted.
        time.sleep(0.01)


def source(next_url):
    own = engine(0)
    todo = deque(range(STEPS))
    while todo:
        sender = opened(own, next_url, "activations")
        corr = None
        try:
            while todo:
                corr = todo.popleft()
                sender.post(inputs(corr), corr, timeout_ms=PATIENCE_MS)
                corr = None
            sender.close()
            sender.drain(PATIENCE_MS)
        except ConnectionError as error:
            lost = error.untaken
            print(f"channel failed; to be sent again: {lost}")
            if corr is not None and corr not in lost:
                todo.appendleft(corr)
            todo.extendleft(reversed(lost))
    own.close()


def middle(port, next_url):
    own = engine(1, int(port))
    print("url", own.local_url)
    receiver = own.accept_channel("activations", timeout_ms=PATIENCE_MS)
    sender = opened(own, next_url, "results")
    for step in receiver:
        activations, position = step
        result = compute(activations, int(position[0]))
        # As long as a small model might take.
        time.sleep(0.002)
        sender.send([result], step.corr, timeout_ms=PATIENCE_MS)
        # Not before: now its result is in the sink's memory.
        step.release()
    sender.close()
    sender.drain(PATIENCE_MS)
    own.close()


def sink():
    own = engine(2)
    print("url", own.local_url)
    seen, twice, failures = set(), 0, 0
    while failures < 2 and len(seen) < STEPS:
        receiver = own.accept_channel("results", timeout_ms=PATIENCE_MS)
        taken = 0
        try:
            for step in receiver:
                activations, position = inputs(step.corr)
                if bytes(step.memory(0)) != compute(activations, position[0]).tobytes():
                    raise SystemExit(f"failed: the result of step {step.corr} is wrong")
                taken += 1
                twice += step.corr in seen
                seen.add(step.corr)
                step.release()
                if failures == 0 and len(seen) == STEPS // 3:
                    print("a third")
                if failures == 1 and taken == 1:
                    print("first result of the new middle")
        except ConnectionError as error:
            print(f"channel failed after {taken} results: {error}")
            failures += 1
    if len(seen) != STEPS or failures != 1:
        raise SystemExit(f"failed: {len(seen)} of {STEPS} results, {failures} failures")
    print(f"{STEPS} results, {twice} of them twice")
    own.close()


if __name__ == "__main__":
    STAGES = {"source": source, "middle": middle, "sink": sink}
    if len(sys.argv) == 1:
        pipeline()
    else:
        STAGES[sys.argv[1]](*sys.argv[2:])
