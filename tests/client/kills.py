"""A middle stage is killed while steps are in flight in it, again and again."""

import random
import threading

import work
from pipeline import Wrong

# Replies of this many steps come before each kill.
CALM_STEPS = 3
# The client's own time-out is 8 s: a reply that comes later than this came by that, and not because a death was told.
OWN_TIMEOUT_S = 7
# When the victim is killed after it has begun with a step: spread over the 50 ms at which the client looks for news.
DELAY_S = (0.02, 0.12)


def rounds(pipeline, kills, ballast, say):
    """Kills a middle stage `kills` times; yields what each kill cost, in milliseconds."""
    inflight = pipeline.settings.inflight
    for round_number in range(kills):
        victim = pipeline.stages[work.MIDDLE, calm(pipeline)]
        if ballast:
            victim.touch(ballast)
        cost = kill_one(pipeline, victim, inflight)
        say(
            f"{inflight} in flight, kill {round_number + 1} of {kills}: replica {victim.replica}, "
            f"next reply after {cost['next_reply_ms']:.1f} ms"
        )
        yield cost
        place = next(
            p for p in pipeline.places if (p.stage, p.replica) == (victim.stage, victim.replica)
        )
        pipeline.launch(place)
        pipeline.stages[place.stage, place.replica].wait_ready()
        pipeline.wait_links()


def calm(pipeline):
    """Some steps without a fault; returns the middle replica that answers."""
    for _ in range(CALM_STEPS):
        steps = [pipeline.submit() for _ in range(pipeline.settings.inflight)]
        paths = [pipeline.wait(step)[0] for step in steps]
    return paths[-1][0]["replica"]


def kill_one(pipeline, victim, inflight):
    """Steps in flight in `victim`, which is killed; all of them must come back through the other replica."""
    killed, failed = [], []

    def executioner():
        try:
            victim.wait_until("it had a step", lambda: victim.said.get("holds") in numbers)
            pipeline.endpoint.waits.wait()
            threading.Event().wait(random.uniform(*DELAY_S))
            killed.append(victim.kill())
        except BaseException as error:
            failed.append(error)
            raise

    pipeline.deaths.clear()
    steps = [pipeline.submit(hold=victim.pid) for _ in range(inflight)]
    numbers = [number for number, _ in steps]
    # Set again by the wait below: what it says of the calm steps is over.
    pipeline.endpoint.waits.clear()
    thread = threading.Thread(target=executioner)
    thread.start()
    replies = []
    try:
        replies = [pipeline.wait(step) for step in steps]
    finally:
        thread.join()
        if failed:
            raise failed[0]
    victim.reap()
    for number, (path, _) in zip(numbers, replies):
        if path[0]["replica"] == victim.replica:
            raise Wrong(
                f"step {number} was answered by replica {victim.replica}, which was killed with it in flight"
            )
    return cost(pipeline, victim, killed[0], [when for _, when in replies])


def cost(pipeline, victim, killed, replies):
    """What stage 0 noticed, in milliseconds from the kill."""
    if min(replies) < killed:
        raise Wrong("a step that was held came back before the kill")
    event, acted = pipeline.death((victim.stage, victim.replica))
    if event["status"] != -2:
        raise Wrong(f"stage 0 was told of a suspicion and not of a death: {event}")
    if min(replies) - killed > OWN_TIMEOUT_S:
        raise Wrong(
            f"the next reply took {min(replies) - killed:.1f} s: the client waited out its own "
            f"time-out, though it was told after {acted - killed:.3f} s"
        )
    return {
        "event_ms": event["ts_ns"] / 1e6 - killed * 1e3,
        "acted_ms": (acted - killed) * 1e3,
        "next_reply_ms": (min(replies) - killed) * 1e3,
        "all_replies_ms": (max(replies) - killed) * 1e3,
        "reason": event["reason"],
    }
