"""Metrics: one catalogue, feeds that fill it, sinks that take it. Nothing here needs Ray except `ray_sink`."""

from hisparse.metrics.catalogue import CATALOGUE
from hisparse.metrics.engine_feed import EngineFeed
from hisparse.metrics.metric import Kind, Metric
from hisparse.metrics.request_feed import HttpFeed, RequestFeed
from hisparse.metrics.sinks import MemorySink, NullSink, Sink

__all__ = ["CATALOGUE", "EngineFeed", "HttpFeed", "Kind", "MemorySink", "Metric", "NullSink", "RequestFeed", "Sink"]
