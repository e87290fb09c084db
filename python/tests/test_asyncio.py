"""Transfers as awaitables."""

import asyncio
import os
import threading
import time

import pytest


@pytest.fixture
def ready(linked):
    a, b = linked
    a.here, b.there = a.buffer(1 << 20), b.buffer(1 << 20, os.urandom(1 << 20))
    return a, b


def test_await(ready):
    a, b = ready

    async def main():
        assert await a.engine.get_async(b.url, a.here, b.there, 1 << 20) is None
        return a.bytes(a.here, 1 << 20)

    assert asyncio.run(main()) == b.bytes(b.there, 1 << 20)


def test_await_of_one_that_has_ended(ready):
    a, b = ready
    transfer = a.engine.get_async(b.url, a.here, b.there, 8)
    transfer.wait()

    async def main():
        await transfer
        await transfer

    asyncio.run(main())


def test_await_raises_as_wait_does(ready):
    a, b = ready

    async def main():
        with pytest.raises(ValueError) as caught:
            await a.engine.get_async(b.url, a.here, 64, 8)
        assert caught.value.code == -4
        with pytest.raises(ConnectionError):
            await a.engine.get_async(b.url[:-1] + "9", a.here, b.there, 8)

    asyncio.run(main())


def test_many_at_once(ready):
    a, b = ready

    async def main():
        transfers = [
            a.engine.get_async(b.url, a.here + i * 64, b.there + i * 64, 64) for i in range(1000)
        ]

        async def one(transfer):
            await transfer

        await asyncio.gather(
            *(one(transfer) for transfer in transfers), *(one(t) for t in transfers[:100])
        )
        assert all(transfer.done() for transfer in transfers)

    asyncio.run(main())


@pytest.fixture
def stuck(ready):
    """A transfer that does not end by itself, and its sender."""
    import socket

    a, b = ready
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"127.0.0.1:{server.getsockname()[1]}#silent|0|0|0"
        yield a.engine, a.engine.get_async(url, a.here, b.there, 8, 60_000)


def test_several_tasks_await_one(stuck):
    engine, transfer = stuck

    async def wait():
        with pytest.raises(RuntimeError, match=r"^canceled"):
            await transfer
        return 1

    async def main():
        tasks = [asyncio.ensure_future(wait()) for _ in range(5)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in tasks)
        await asyncio.get_running_loop().run_in_executor(None, engine.close)
        assert sum(await asyncio.gather(*tasks)) == 5

    asyncio.run(main())


def test_several_loops_await_one(stuck):
    engine, transfer = stuck
    ended = []

    def loop():
        async def main():
            try:
                await transfer
            except RuntimeError as error:
                ended.append(str(error))

        asyncio.run(main())

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    engine.close()
    for thread in threads:
        thread.join(30)
    assert len(ended) == 4


def test_a_canceled_task_leaves_the_transfer_running(stuck):
    engine, transfer = stuck

    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaiting(transfer), 0.05)
        assert transfer.done() is False

    asyncio.run(main())
    # The loop is closed by now; the end of the transfer disturbs nobody.
    engine.close()
    with pytest.raises(RuntimeError, match=r"^canceled"):
        transfer.wait()


async def _awaiting(transfer):
    await transfer


def test_the_loop_runs_while_a_transfer_is_awaited(stuck):
    _engine, transfer = stuck

    async def main():
        ticks = 0
        task = asyncio.ensure_future(_awaiting(transfer))
        used = time.process_time()
        for _ in range(20):
            await asyncio.sleep(0.01)
            ticks += 1
        # No busy polling: what a sleeping process uses, with room for a loaded machine.
        assert time.process_time() - used < 0.15
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ticks

    assert asyncio.run(main()) == 20


def test_await_without_a_loop(stuck):
    _, transfer = stuck
    with pytest.raises(RuntimeError, match="loop"):
        transfer.__await__()
