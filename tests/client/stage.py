"""A later stage of the pipeline, in a process of its own.

    python stage.py STAGE REPLICA PORT ROUTER INFLIGHT

It answers steps until its standard input ends. What it has to say goes to standard output, a line of JSON each; the
log goes to standard error. Where its engine listens and where the control plane is say variables of the client.
"""

import json
import os
import sys
import threading

# What the client prints must not get between the lines.
lines = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import torch  # noqa: E402
from connex.pp import StageWorker  # noqa: E402

import work  # noqa: E402
from endpoint import FellBack, log_to, open_endpoint  # noqa: E402

# How long a stage that is to be killed waits for it.
PATIENCE_S = 120

telling = threading.Lock()


def tell(**what):
    """Says it to the driver; any thread may."""
    with telling:
        lines.write(json.dumps(what) + "\n")


class Stage:
    """What the client asks of an engine of inference, as far as this test has one."""

    def __init__(self, stage, replica, port, router, inflight):
        self.stage, self.replica = stage, replica
        self.endpoint, self.engine = open_endpoint(
            stage, port, router, inflight, lambda peer, event: tell(peer=peer, event=event["type"])
        )

    def compute(self, step, _missing):
        """One step: the tensor, and a line for its path. A step that is meant to be in flight when this process
        dies is not computed here, whatever happens."""
        if step.get("hold") == os.getpid():
            tell(holds=step["number"])
            threading.Event().wait(PATIENCE_S)
            print(
                f"held step {step['number']} for {PATIENCE_S} s and was not killed", file=sys.stderr
            )
            os._exit(4)
        reads = self.engine.stats()["rma_ok"]
        visit = work.visit(self.stage, self.replica, os.getpid(), reads)
        return {
            "number": step["number"],
            "hold": step.get("hold"),
            "x": work.compute(self.stage, step["x"]),
            "path": [*step["path"], visit],
        }

    def kv_held(self, _request):
        """Nothing is cached."""
        return 0

    def release(self, _requests):
        """Nothing to release."""

    def serve(self):
        """Answers steps for ever. A step whose sender died before it was read is in the log; stage 0 sends it again."""
        worker = StageWorker(self.endpoint, self, self.compute)
        while True:
            try:
                worker.serve_one()
            except RuntimeError as error:
                if "transfer failed" not in str(error):
                    raise


def obey():
    """Does what the driver says, and ends with it."""
    ballast = []
    for line in sys.stdin:
        size = json.loads(line)["ballast"]
        # Every page is written to, so that the kernel has it to free; without the interpreter's lock.
        ballast.append(torch.ones(size, dtype=torch.uint8))
        tell(ballast=size)
    # No clean-up: the client's threads would finish seconds of waiting first.
    os._exit(0)


def main():
    stage, replica, port, inflight = (int(sys.argv[i]) for i in (1, 2, 3, 5))
    log_to(sys.stderr)
    threading.Thread(target=obey, daemon=True).start()
    try:
        process = Stage(stage, replica, port, sys.argv[4], inflight)
    except FellBack as error:
        tell(fell_back=str(error))
        os._exit(3)
    tell(ready=process.engine.local_url, stats=process.engine.stats())
    process.serve()


main()
