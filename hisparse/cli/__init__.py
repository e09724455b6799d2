"""Command line, one module a command. Exit codes: 0 ok, 1 failed, 2 usage."""

from hisparse.cli.app import app, main
from hisparse.cli.configuration import read_configuration
from hisparse.cli.serve import free_port

__all__ = ["app", "free_port", "main", "read_configuration"]
