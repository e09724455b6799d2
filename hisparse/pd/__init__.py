"""Prefill/decode: landing planner, leases, wire protocol, transports, imports. Needs no Ray; nixl.py alone needs nixl."""
