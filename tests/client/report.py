"""The result, for people and for programs."""

import collections
import statistics

# From the kill to: the engine's event, the client's having acted on it, the first reply, the last of the steps in flight.
TIMES = {
    "event_ms": "event",
    "acted_ms": "client acted",
    "next_reply_ms": "next reply",
    "all_replies_ms": "all replies",
}


def summary(pipeline, costs):
    """The result of the kills at one number of steps in flight."""
    times = {name: [round(cost[name], 2) for cost in costs] for name in TIMES}
    return {
        "inflight": pipeline.settings.inflight,
        "kills": len(costs),
        "steps": pipeline.number,
        "sent_again": pipeline.client.stats["retries"],
        "reasons": dict(collections.Counter(cost["reason"] for cost in costs)),
        **{
            name: {"median": statistics.median(values), "worst": max(values), "all": values}
            for name, values in times.items()
        },
    }


def table(report):
    """The report as text."""
    what = report["measured"]
    lines = [
        f"connex-rs {what['connex_rs']} over {what['transport']}, sentinel {what['sentinel']}, "
        f"{report['bytes']} bytes a step, {report['ballast'] / 2**30:g} GiB of ballast; ms from SIGKILL, median / worst",
        "",
        f"{'in flight':>9} {'kills':>6} {'steps':>6}"
        + "".join(f" {head:>17}" for head in TIMES.values()),
    ]
    for run in report["runs"]:
        cells = "".join(
            f" {run[name]['median']:8.1f} / {run[name]['worst']:6.1f}" for name in TIMES
        )
        lines.append(f"{run['inflight']:>9} {run['kills']:>6} {run['steps']:>6}{cells}")
    return "\n".join(lines)
