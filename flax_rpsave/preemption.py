"""Whether this process was told that it will be stopped soon.

A signal handler only notes the signal: the loop saves at its next call. A handler that stood there before is called
too, and is put back by `close`; where it cannot be (another watch was made after this one and still stands, or `close`
runs in another thread), this one stays and passes signals on.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger("flax_rpsave")


class PreemptionWatch:
    """Watches for signals.

    Args:
      signals: Names such as "SIGTERM"; none watches for nothing. Python installs handlers in the main thread only;
        elsewhere this is logged and nothing is watched.
    """

    def __init__(self, signals: Sequence[str]):
        self.received: str | None = None
        self._before: dict[int, Any] = {}
        self._closed = False
        if signals and threading.current_thread() is not threading.main_thread():
            logger.warning("preemption signals are not watched: the callback was not made in the main thread")
            return
        for name in signals:
            number = signal.Signals[name]
            self._before[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Puts the handlers back that were there before."""
        self._closed = True
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: Any) -> None:
        before = self._before.get(number)
        if not self._closed:
            self.received = signal.Signals(number).name
        elif before in (signal.SIG_DFL, None):  # nobody watches any more: the program ends, as it would without us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if callable(before):
            before(number, frame)
