"""The guard against a client that takes another data path is itself put to the test."""

import work
from pipeline import Settings, StagePlace, free_ports
from processes import ControlPlane, Lost, StageProcess


class Unguarded(RuntimeError):
    """The guard let a stage pass that does not use connex-rs."""


def prove(logs):
    """Starts a stage whose engine cannot start, so that the client falls back, and wants to hear of that.

    Raises Unguarded if the stage comes up, or ends for another reason."""
    control = ControlPlane(logs)
    try:
        place = StagePlace(work.LAST, 0, *free_ports(2))
        stage = StageProcess(Broken(control.api, control.events, 1), place, logs)
        try:
            stage.wait_ready()
        except Lost as lost:
            if "fell back from connex-rs" not in str(lost):
                raise
        else:
            raise Unguarded("a stage without connex-rs was taken for one with it")
        finally:
            stage.end()
    finally:
        control.end()


class Broken(Settings):
    """Settings with which no engine starts."""

    def environment(self, place):
        return {**super().environment(place), "CONNEX_RS_TRANSPORT": "no-such-transport"}
