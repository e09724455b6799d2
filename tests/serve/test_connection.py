"""A stream whose client is gone: every choice is aborted then, not when somebody collects garbage."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hisparse.serve.calls import GenerateCall
from hisparse.serve.connection import EventStream
from hisparse.serve.generation import Generation
from hisparse.serve.writers import CompletionWriter
from tests.serve.fakes import FakeBackend


@pytest.mark.parametrize("spec", ["2.3", "2.4"])
@pytest.mark.parametrize("sends", [0, 1, 2])
def test_all_choices_are_aborted_at_once(spec: str, sends: int) -> None:
    """The connection breaks at the head, at the first event or at the second, as servers of both versions say it."""
    backend = FakeBackend()
    backend.hang_at = 2

    async def talk() -> Any:
        writer = CompletionWriter("m", "1", fingerprint="fp", num_choices=3)
        calls = [GenerateCall(request_id=f"{writer.id}-{i}", text="x") for i in range(3)]
        chunks = Generation(backend, calls, 5.0).chunks()
        stream = EventStream(writer, await anext(chunks), chunks)
        gone = asyncio.Event()
        sent = 0

        async def receive() -> Any:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal sent
            sent += 1
            if sent > sends:
                gone.set()
                if spec == "2.4":
                    raise OSError("broken pipe")
                await asyncio.sleep(5)

        await stream({"type": "http", "asgi": {"spec_version": spec}}, receive, send)
        await asyncio.sleep(0)
        assert sorted(backend.aborted) == [call.request_id for call in calls]
        return chunks, stream

    asyncio.run(asyncio.wait_for(talk(), 20))
