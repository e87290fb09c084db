"""Finding the UCX that a Python package brings (`pip install libucx-cu12`), without importing that
package.
"""

from __future__ import annotations

import importlib.util
import os

from connex_rs import _connex_rs


def wheel_dir() -> str | None:
    """The folder of the `libucx` package, if one is installed."""
    try:
        spec = importlib.util.find_spec("libucx")
    except (ImportError, ValueError):
        # A half-removed package, or one that somebody put into sys.modules by hand.
        return None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if os.path.isfile(os.path.join(place, "lib", "libucp.so.0")):
            return place
    return None


def announce_wheel() -> None:
    """Tells the native module where that folder is; it decides later, when a UCX is needed, which
    one to load.
    """
    place = wheel_dir()
    if place is not None:
        _connex_rs.set_ucx_wheel(place)
