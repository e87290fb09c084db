"""Data plane for pipelines of model stages: moves step data between endpoints at the speed of the
network and tells within
milliseconds when a peer dies.

`Engine` is the way in. Importing this module loads neither UCX nor a CUDA library.
"""

from connex_rs import _ucx
from connex_rs._connex_rs import Engine, Transfer, __version__, now_ns

__all__ = ["Engine", "Transfer", "__version__", "now_ns"]

_ucx.announce_wheel()


def _await(transfer):
    # Here and not in the extension, so that no native frame lies under the event loop's; asyncio
    # costs time to import.
    from connex_rs._awaiting import awaiting

    return awaiting(transfer)


Transfer.__await__ = _await
