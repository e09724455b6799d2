"""Probes of a machine: what hisparse needs, what is there, and what to do about the difference."""
