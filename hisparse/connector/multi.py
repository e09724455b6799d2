"""Composition of connectors: routes by name, and joins the loads that one request has with several of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from hisparse.connector.base import LoadEvents, SchedulerConnector, WorkerConnector
from hisparse.errors import ConfigError, InvariantError


@runtime_checkable
class LoadingConnector(Protocol):
    """A scheduler half that loads asynchronously tells which live requests it is loading for."""

    def loading(self) -> Collection[str]:
        """Request ids with a load planned or in flight."""


class MultiSchedulerConnector:
    """Scheduler half: one connector that is several. Loads are started on the children themselves.

    A request is loaded when every child that was loading for it has said so. When any of them failed, the request is
    reported as failed, but only once all have drained. Completions nobody waits for are ignored and counted.

    Args:
        children: in routing order; unique names.
    """

    name = "multi"

    def __init__(self, children: Sequence[SchedulerConnector]) -> None:
        names = [child.name for child in children]
        if len(set(names)) != len(names):
            raise ConfigError(f"connector names must be unique, got {names}")
        self.children = tuple(children)
        self.late_completions = 0
        """Completions of loads that nobody waits for: repeated, or never seen as started."""
        self._waiting: dict[str, set[str]] = {}  # request -> children that still load for it
        self._failures: dict[str, list[str]] = {}  # request -> reasons so far
        self._closed: list[tuple[str, set[str]]] = []  # closed requests -> children that still drain for them

    def build_metadata(self, step: int) -> dict[str, Any] | None:
        """By child name; None when no child has work."""
        self._note_loads()
        metadata = {child.name: child.build_metadata(step) for child in self.children}
        metadata = {name: value for name, value in metadata.items() if value is not None}
        return metadata or None

    def update(self, outputs: Sequence[Mapping[str, Any]]) -> LoadEvents:
        """Takes each rank's outputs by child name. Every child is updated, also without output: time passes there."""
        self._note_loads()
        loaded: set[str] = set()
        failed: dict[str, str] = {}
        released: list[int] = []
        drained: list[str] = []
        overdue: dict[str, str] = {}
        for child in self.children:
            events = child.update([output[child.name] for output in outputs if child.name in output])
            released.extend(events.released_device_blocks)
            for request_id in sorted(events.loaded):
                self._finish(child.name, request_id, None, loaded, failed)
            for request_id, reason in sorted(events.failed.items()):
                self._finish(child.name, request_id, reason, loaded, failed)
            for request_id in events.drained:
                drained.extend(self._drain(child.name, request_id))
            overdue |= {request_id: f"{child.name}: {reason}" for request_id, reason in events.overdue.items()
                        if child.name in self._waiting.get(request_id, ())}
        return LoadEvents(loaded=frozenset(loaded), failed=failed, released_device_blocks=tuple(released),
                          drained=tuple(drained), overdue=overdue)

    def request_closed(self, request_id: str) -> None:
        self._note_loads()
        for child in self.children:
            child.request_closed(request_id)
        waiting = self._waiting.pop(request_id, None)
        self._failures.pop(request_id, None)
        if waiting:
            self._closed.append((request_id, waiting))

    def loading(self) -> frozenset[str]:
        """Live requests that any child is loading for."""
        self._note_loads()
        return frozenset(self._waiting)

    def has_pending_work(self) -> bool:
        return any(child.has_pending_work() for child in self.children)

    def check(self) -> None:
        for child in self.children:
            child.check()
        for request_id, names in self._waiting.items():
            if not names:
                raise InvariantError(f"request {request_id} waits for no connector but was not reported as loaded")
        for request_id in self._failures:
            if request_id not in self._waiting:
                raise InvariantError(f"request {request_id} has failure reasons but no outstanding load")

    def _note_loads(self) -> None:
        for child in self.children:
            if isinstance(child, LoadingConnector):
                for request_id in child.loading():
                    self._waiting.setdefault(request_id, set()).add(child.name)

    def _finish(self, name: str, request_id: str, reason: str | None, loaded: set[str], failed: dict[str, str]) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is None or name not in waiting:
            self.late_completions += 1
            return
        waiting.discard(name)
        if reason is not None:
            self._failures.setdefault(request_id, []).append(f"{name}: {reason}")
        if waiting:
            return
        del self._waiting[request_id]
        reasons = self._failures.pop(request_id, None)
        if reasons:
            failed[request_id] = "; ".join(reasons)
        else:
            loaded.add(request_id)

    def _drain(self, name: str, request_id: str) -> list[str]:
        for i, (closed_id, waiting) in enumerate(self._closed):
            if closed_id == request_id and name in waiting:
                waiting.discard(name)
                if waiting:
                    return []
                del self._closed[i]
                return [request_id]
        self.late_completions += 1
        return []


class MultiWorkerConnector:
    """Worker half: runs every child in order. The hisparse child comes first: it applies what the others rely on.

    Args:
        children: unique names.
    """

    name = "multi"

    def __init__(self, children: Sequence[WorkerConnector]) -> None:
        names = [child.name for child in children]
        if len(set(names)) != len(names):
            raise ConfigError(f"connector names must be unique, got {names}")
        self.children = tuple(children)

    def start_step(self, metadata: Mapping[str, Any] | None) -> None:
        """Args: metadata by child name. Raises InvariantError for a name that is not a child's."""
        metadata = metadata or {}
        unknown = set(metadata) - {child.name for child in self.children}
        if unknown:
            raise InvariantError(f"metadata for unknown connectors {sorted(unknown)}")
        for child in self.children:
            child.start_step(metadata.get(child.name))

    def end_step(self) -> None:
        for child in self.children:
            child.end_step()

    def output(self) -> dict[str, Any] | None:
        """By child name; None when no child has anything to say."""
        outputs = {child.name: child.output() for child in self.children}
        outputs = {name: value for name, value in outputs.items() if value is not None}
        return outputs or None

    def shutdown(self) -> None:
        """Shuts every child down, last first; the first error is raised after all were tried."""
        errors: list[Exception] = []
        for child in reversed(self.children):
            try:
                child.shutdown()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
