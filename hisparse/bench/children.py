"""Processes that a benchmark starts, and ends itself."""

from __future__ import annotations

import signal
import threading
from multiprocessing.process import BaseProcess


def start(process: BaseProcess) -> None:
    """Starts it so that Ctrl-C, which a terminal sends to every process of the command, is left to the parent."""
    if threading.current_thread() is not threading.main_thread():
        process.start()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a spawned process inherits
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
