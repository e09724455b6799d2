"""The only door to Ray core: start, call, await and kill actors; placement groups; a local cluster.

Everything above talks to `Actor`, never to Ray, so that it can be tested without a cluster. Every wait has a deadline,
and Ray's exceptions become ours: a dead actor is an `EngineDeadError`, a late answer a `TimeoutError`, and an exception
raised inside an actor arrives as itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.util import get_current_placement_group, list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from hisparse.errors import ConfigError, EngineDeadError, HiSparseError

NAMESPACE = "hisparse"
"""Ray namespace of every named actor of ours, whichever job started it."""

CONNECT_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


def translate(error: BaseException, label: str = "an actor") -> BaseException:
    """Our exception for one of Ray's; any other exception is returned as it is."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return translate(cause, label) if isinstance(cause, Exception) else EngineDeadError(f"{label} failed: {error}")
    if isinstance(error, GetTimeoutError):
        return TimeoutError(f"{label} did not answer in time")
    if isinstance(error, RayActorError):
        return EngineDeadError(f"{label} is dead: {_first_line(error)}")
    if isinstance(error, TaskCancelledError):
        return asyncio.CancelledError()
    if isinstance(error, RayError):
        return EngineDeadError(f"{label} cannot be reached: {_first_line(error)}")
    return error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@dataclass(frozen=True, slots=True)
class Pending:
    """One call under way."""

    ref: Any
    label: str


class Actor:
    """A started actor. Picklable: it may be handed to other actors."""

    __slots__ = ("_handle", "label")

    def __init__(self, handle: Any, label: str) -> None:
        self._handle = handle
        self.label = label

    def __reduce__(self) -> tuple[Any, ...]:
        return (Actor, (self._handle, self.label))

    def __repr__(self) -> str:
        return f"Actor({self.label})"

    def start(self, method: str, *args: Any) -> Pending:
        """Sends a call and returns at once; `gather` collects the answer."""
        return Pending(getattr(self._handle, method).remote(*args), f"{self.label}.{method}")

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls and blocks for the answer; never use it on an event loop."""
        return gather([self.start(method, *args)], timeout_s)[0]

    async def acall(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls and awaits the answer."""
        pending = self.start(method, *args)
        try:
            return await asyncio.wait_for(_awaitable(pending.ref), timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{pending.label} did not answer within {timeout_s:g} s") from None
        except Exception as error:
            _raise(error, pending.label)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """Yields the values of an async generator method as they come; the caller bounds the waits."""
        label = f"{self.label}.{method}"
        generator = getattr(self._handle, method).options(num_returns="streaming").remote(*args)
        try:
            async for ref in generator:
                yield await ref
        except Exception as error:
            _raise(error, label)

    def kill(self) -> None:
        """Has the actor's process ended; returns at once, so a call that gets there first is still answered. Idempotent."""
        try:
            ray.kill(self._handle, no_restart=True)
        except Exception as error:
            logger.debug("kill of %s: %s", self.label, error)


async def _awaitable(ref: Any) -> Any:
    return await ref


def _raise(error: BaseException, label: str) -> None:
    ours = translate(error, label)
    if ours is error:
        raise error
    raise ours from None


def gather(pendings: Sequence[Pending], timeout_s: float) -> list[Any]:
    """Blocks for the answers of several calls, in their order.

    Raises:
        TimeoutError: one has not answered within `timeout_s`; names it.
        Exception: the first failure, as soon as it is known, even while others still run.
    """
    futures: dict[Future[Any], Pending] = {pending.ref.future(): pending for pending in pendings}
    done, late = wait(futures, timeout=timeout_s, return_when=FIRST_EXCEPTION)
    for future in done:
        error = future.exception()
        if error is not None:
            _raise(error, futures[future].label)
    if late:
        names = ", ".join(sorted(futures[future].label for future in late))
        raise TimeoutError(f"no answer within {timeout_s:g} s from {names}")
    return [future.result() for future in futures]


# --------------------------------------------------------------------------------------------- start and find actors


def start_actor(cls: type, *args: Any, label: str, name: str | None = None, num_cpus: float = 0.0, num_gpus: float = 0.0,
                placement: PlacementGroup | None = None, bundle: int = -1, max_concurrency: int | None = None,
                node_id: str | None = None) -> Actor:
    """Starts `cls(*args)` as an actor without restarts; it ends with the process that started it.

    Args:
        name: unique name in our namespace, for `find_actors`; None = unnamed.
        bundle: of `placement`; -1 = any.
        node_id: of `cluster_nodes`: on this node or nowhere; not together with `placement`.
    """
    options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": 0, "max_task_retries": 0}
    if placement is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=placement, placement_group_bundle_index=bundle
        )
    if node_id is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
    if name is not None:
        options |= {"name": name, "namespace": NAMESPACE}
    if max_concurrency is not None:
        options["max_concurrency"] = max_concurrency
    return Actor(ray.remote(**options)(cls).remote(*args), label)


def find_actors(prefix: str) -> list[Actor]:
    """Living named actors of ours whose name starts with `prefix`, by name."""
    names = sorted(
        item["name"] for item in list_named_actors(all_namespaces=True)
        if item["namespace"] == NAMESPACE and item["name"].startswith(prefix)
    )
    found = []
    for name in names:
        try:
            found.append(Actor(ray.get_actor(name, namespace=NAMESPACE), name))
        except ValueError:
            continue  # it died in between
    return found


def metrics_endpoints() -> list[str]:
    """Where Prometheus finds the metrics of each living node of the cluster: URLs, sorted."""
    known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = [node for node in known if node["Alive"] and node.get("MetricsExportPort")]
    return sorted(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes)


# --------------------------------------------------------------------------------------------- placement groups


def current_placement() -> PlacementGroup | None:
    """The placement group this process was started in, or None."""
    group: PlacementGroup | None = get_current_placement_group()
    return group


def create_placement(bundles: Sequence[dict[str, float]], *, timeout_s: float) -> PlacementGroup:
    """Reserves the bundles on one node; the group ends with its creator.

    Raises:
        ConfigError: not available within `timeout_s`; says what was asked and what the cluster has. Nothing is kept.
    """
    group: PlacementGroup = placement_group(list(bundles), strategy="STRICT_PACK")
    if group.wait(timeout_seconds=timeout_s):
        return group
    remove_placement_group(group)
    wanted: dict[str, float] = {}
    for item in bundles:
        for resource, amount in item.items():
            wanted[resource] = wanted.get(resource, 0.0) + amount
    available: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    free = {key: value for key, value in available.items() if key in wanted}
    raise ConfigError(
        f"no single node had {_amounts(wanted)} free for this engine within {timeout_s:g} s (the whole cluster has "
        f"{_amounts(free) or 'none of it'} free); lower tensor_parallel_size or the number of replicas, or add a node"
    )


def remove_placement(group: PlacementGroup) -> None:
    """Frees the bundles and ends what runs in them. Idempotent."""
    remove_placement_group(group)


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))


# --------------------------------------------------------------------------------------------- cluster


def start_cluster(num_cpus: int | None = None, *, join: bool = True) -> bool:
    """Connects to the running Ray cluster of this machine or `RAY_ADDRESS`; starts a local one if there is none.

    Args:
        join: False = never use a running cluster, always start one.
    Returns whether a cluster was started here.

    Raises:
        HiSparseError: nothing answers at RAY_ADDRESS, or a Ray or Python of another version does.
    """
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS", "")
    if join and address != "local" and _join(logging.WARNING):
        return False
    if join and address not in ("", "auto", "local"):
        raise HiSparseError(f"RAY_ADDRESS is {address}, and no Ray cluster answers there; start it ('ray start --head'), or "
                            "unset RAY_ADDRESS to start one here")
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False,
             logging_level=logging.WARNING)
    return True


def join_cluster() -> bool:
    """Connects to the running cluster of this machine or `RAY_ADDRESS`; False if there is none. Starts nothing.

    Raises:
        HiSparseError: a Ray or Python of another version runs there.
    """
    return ray.is_initialized() or _join(logging.ERROR)


def _join(logging_level: int) -> bool:
    host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging_level)
        return True
    except OSError:  # ConnectionError, too
        return False
    except RuntimeError as error:
        if "Version mismatch" not in str(error):
            raise
        ray.shutdown()
        raise HiSparseError(
            f"the Ray cluster that runs here (or at RAY_ADDRESS) is of another version. {' '.join(str(error).split())} Install "
            "the same versions on both sides, stop that cluster ('ray stop'), or set RAY_ADDRESS=local to start another one "
            "beside it") from error


def cluster_address() -> str:
    """Of the cluster that this process is connected to. Example: 10.0.0.1:6379."""
    return str(ray.get_runtime_context().gcs_address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node of the cluster. `resources`: in all, e.g. {"CPU": 8.0, "GPU": 1.0, "memory": 6e10} (bytes)."""

    node_id: str
    address: str
    name: str
    resources: dict[str, float]


def cluster_nodes() -> list[Node]:
    """Every living node, by address."""
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = [Node(node_id=item["NodeID"], address=item["NodeManagerAddress"], name=item["NodeManagerHostname"],
                  resources={key: value for key, value in item["Resources"].items() if not key.startswith("node:")})
             for item in found if item["Alive"]]
    return sorted(nodes, key=lambda node: (node.address, node.node_id))


def free_resources() -> dict[str, float]:
    """Of the whole cluster, e.g. {"CPU": 1.5}; what none is free of may be missing."""
    found: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return found


def stop_cluster() -> None:
    """Disconnects, and ends the cluster if this process started it."""
    ray.shutdown()

