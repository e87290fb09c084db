"""What the tests share: engines in pairs, over every transport that is to be tested, and a limit on
every test's time.

`CONNEX_TEST_TRANSPORTS` names the transports, by default `tcp`; for example `tcp,ucx`.
"""

import contextlib
import faulthandler
import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

import connex_rs

TRANSPORTS = os.environ.get("CONNEX_TEST_TRANSPORTS", "tcp").split(",")

# Longer than any test takes on a loaded machine: a test that hangs shows where, and ends the run.
LIMIT_S = 150

_models = itertools.count()


def pytest_configure(config):
    config.addinivalue_line("markers", "only_over(transport, reason): holds over this one only")
    config.addinivalue_line("filterwarnings", "error")
    # Tests send these to children, which inherit it if a shell started us with them ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config, items):
    def holds(item):
        mark = item.get_closest_marker("only_over")
        return mark is None or item.callspec.params["transport"] == mark.args[0]

    others = [item for item in items if not holds(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if holds(item)]


@pytest.fixture(autouse=True)
def _limit():
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


class Site:
    """One engine with helpers. Everything is closed at the end of the test."""

    def __init__(self, stack, transport, model, stage, **options):
        options.setdefault("listen_ip", "127.0.0.1")
        self.engine = connex_rs.Engine(model, stage, transport=transport, **options)
        stack.callback(self.engine.close)

    @property
    def url(self):
        return self.engine.local_url

    def buffer(self, size, fill=None):
        """A managed buffer, filled with bytes."""
        ptr = self.engine.allocate_managed_buffer(size)
        if fill is not None:
            assert self.engine.write_bytes_to_buffer(ptr, fill, len(fill)) == 0
        return ptr

    def bytes(self, ptr, size):
        return self.engine.read_bytes_from_buffer(ptr, size)

    def event(self, kind, timeout_s=20):
        """The next event of a kind; others are passed over."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            event = self.engine.wait_event(100)
            if event is not None and event["type"] == kind:
                return event
        raise AssertionError(f"no {kind!r} within {timeout_s} s")


@pytest.fixture
def site(transport):
    """Makes engines: `site(stage, **options)`."""
    model = f"m{os.getpid()}-{next(_models)}"
    with contextlib.ExitStack() as stack:
        yield lambda stage=0, model=model, **options: Site(
            stack, transport, model, stage, **options
        )


@pytest.fixture
def pair(site):
    """Two engines that know nothing of each other yet."""
    return site(0), site(1)


@pytest.fixture
def linked(pair):
    """Two engines with a link."""
    a, b = pair
    a.engine.connect(b.url)
    a.event("up")
    b.event("up")
    return a, b


@pytest.fixture
def script(transport, tmp_path):
    """Runs Python text in a process of its own; `TRANSPORT` is defined in it."""

    processes = []

    def start(text, *args, **options):
        path = tmp_path / f"script{len(processes)}.py"
        path.write_text(f"TRANSPORT = {transport!r}\n{text}")
        process = subprocess.Popen(
            [sys.executable, "-u", "-X", "faulthandler", "-W", "error", str(path), *map(str, args)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def poll_until(condition, timeout_s=20):
    """Waits until something is true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
