"""The residency page: where every open request's KV lives, live in a browser."""

from hisparse.serve.residency.routes import add_residency

__all__ = ["add_residency"]
