"""Awaiting transfers on an asyncio event loop.

No thread of an engine ever takes the interpreter lock: the end of a transfer is a number in the
mailbox of each event loop that awaits it, and the loop watches the mailbox's descriptor.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Generator
from typing import Any
from weakref import WeakKeyDictionary

from connex_rs._connex_rs import Mailbox, Transfer

# How long an `await` looks for the end itself, in microseconds: a small transfer takes less than
# one turn of an event loop does.
HELP_US = 40

# After this many awaits that did not have to wait, one lets the other tasks run.
TURNS = 16


class _Inbox:
    """The mailbox of a loop, and the futures that wait for what comes there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._mailbox = Mailbox()
        self._waiting: dict[int, tuple[Transfer, asyncio.Future[None]]] = {}
        self._numbers = itertools.count(1)
        self.unwaited = 0
        loop.add_reader(self._mailbox.fileno(), self._deliver)

    def awaits(self, transfer: Transfer, future: asyncio.Future[None]) -> None:
        """Has the future settled at the end of the transfer."""
        number = next(self._numbers)
        self._waiting[number] = transfer, future
        if not transfer._tell(self._mailbox, number):
            del self._waiting[number]
            _settle(transfer, future)

    def _deliver(self) -> None:
        for number in self._mailbox.take():
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                _settle(*waiting)


def _settle(transfer: Transfer, future: asyncio.Future[None]) -> None:
    if future.done():
        return  # its task was canceled
    try:
        transfer.wait(0)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(None)


_inboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Inbox] = WeakKeyDictionary()
_lock = threading.Lock()


def _forget() -> None:
    """In a forked child: the loops are the parent's."""
    global _inboxes, _lock
    _inboxes, _lock = WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _inbox(loop: asyncio.AbstractEventLoop) -> _Inbox:
    inbox = _inboxes.get(loop)
    if inbox is not None:
        return inbox
    with _lock:
        # Its futures know their loop, so an inbox would keep a closed one for ever.
        for closed in [known for known in _inboxes if known.is_closed()]:
            del _inboxes[closed]
        inbox = _inboxes[loop] = _Inbox(loop)
    return inbox


def awaiting(transfer: Transfer) -> Generator[Any, None, None]:
    """What `await transfer` runs. RuntimeError where no event loop is running."""
    return _steps(transfer, asyncio.get_running_loop())


def _steps(transfer: Transfer, loop: asyncio.AbstractEventLoop) -> Generator[Any, None, None]:
    inbox = _inbox(loop)
    if inbox.unwaited < TURNS and transfer._help(HELP_US):
        inbox.unwaited += 1
        transfer.wait(0)
        return
    inbox.unwaited = 0
    future = loop.create_future()
    inbox.awaits(transfer, future)
    yield from future
