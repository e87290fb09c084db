"""Drives `connex.pp` of connex-ai over connex-rs, and kills its stages with steps in flight.

Run by `cargo xtask test-client`, which makes the environment. Stage 0 is in this process; the control plane, two replicas of
the middle stage and the last stage are processes of their own. Ends with 0 if every step came back, with the right bytes,
by way of connex-rs.
"""

import argparse
import contextlib
import json
import os
import sys
import traceback

# What the client prints must not get into the report.
output = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import guard  # noqa: E402
from endpoint import log_to  # noqa: E402
from kills import rounds  # noqa: E402
from pipeline import Pipeline  # noqa: E402
from report import summary, table  # noqa: E402


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--inflight", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4]
    )
    parser.add_argument("--ballast", type=int, default=0, help="bytes that the victim touches")
    parser.add_argument("--bytes", type=int, default=1 << 16, help="size of a step's tensor")
    parser.add_argument("--logs", required=True, help="folder for the logs of all stages")
    parser.add_argument("--json", help="file for the report")
    return parser.parse_args()


def say(line):
    output.write(line + "\n")


def main(options):
    report = {
        "bytes": options.bytes,
        "ballast": options.ballast,
        "kills": options.kills,
        "runs": [],
    }
    os.makedirs(options.logs, exist_ok=True)
    with open(os.path.join(options.logs, "stage-0.log"), "w", buffering=1) as log:
        log_to(log)
        guard.prove(options.logs)
        say("a stage whose engine cannot start is found out")
        for inflight in options.inflight:
            logs = os.path.join(options.logs, f"inflight-{inflight}")
            os.makedirs(logs, exist_ok=True)
            pipeline = Pipeline(inflight, options.bytes, logs)
            with contextlib.closing(pipeline):
                pipeline.start()
                report["measured"] = pipeline.versions()
                costs = list(rounds(pipeline, options.kills, options.ballast, say))
                report["runs"].append(summary(pipeline, costs))
    say("\n" + table(report))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


def run():
    """Does not wait for the client's threads at the end: each frees one buffer a second of those that were sent."""
    try:
        main(arguments())
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


run()
