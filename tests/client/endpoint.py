"""The client's pipeline endpoint, over connex-rs and nothing else."""

import logging
import threading

from connex.pp import PipelineEndpoint

import connex_rs
from work import STAGES


class FellBack(RuntimeError):
    """The client took another data path, as it does with no more than a warning."""


class Endpoint(PipelineEndpoint):
    """The client's endpoint, which tells two things more.

    `told(peer, event)` is called, on the client's own thread, when it has acted on a link that is up or lost; `peer` is
    (stage, replica). `waits` is set when stage 0 has begun to wait for a reply: before that the client would not
    notice that a death made the step stale, with one step in flight.
    """

    def __init__(self, told, *arguments, **options):
        self.waits = threading.Event()
        self._told = told
        super().__init__(*arguments, **options)

    def _on_transport_event(self, event):
        super()._on_transport_event(event)
        if event["type"] == "up" or event.get("established"):
            _, stage, _, replica = event["peer"]
            self._told((stage, replica), event)

    def _send_is_stale(self, record):
        stale = super()._send_is_stale(record)
        self.waits.set()
        return stale


def open_endpoint(stage, port, router, inflight, told):
    """An endpoint on `port` of this host, under the control plane at `router`, and its engine.

    Raises FellBack if the client does not use connex-rs."""
    endpoint = Endpoint(told, stage, STAGES, port, router, device="cpu", inflight=inflight)
    engine, metrics = endpoint._mooncake_engine, endpoint.get_connexte_metrics()
    if not isinstance(engine, connex_rs.Engine) or metrics["local_url"] != engine.local_url:
        endpoint.close()
        raise FellBack(
            f"stage {stage} fell back from connex-rs to {type(engine).__name__} with the URL "
            f"{metrics['local_url']}: its log says why"
        )
    if not metrics["epc_client_available"]:
        endpoint.close()
        raise RuntimeError(f"stage {stage} is not registered with the control plane at {router}")
    return endpoint, engine


def log_to(stream):
    """The client's log, from INFO on, to `stream`."""
    logging.basicConfig(
        stream=stream,
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(message)s",
        datefmt="%H:%M:%S",
    )
