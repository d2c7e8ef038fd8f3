"""Whether this run was told that it will be stopped soon.

Alone, a process installs handlers that only note the signal. A handler that stood there before is called too (Python's
own of SIGINT, which would end the loop before it has saved, only from the second signal on), and is put back by
`close`. Where it cannot be (another watch was made after this one and still stands, or `close` runs in another thread),
this one stays and passes signals on. A forked child has the handlers, too, but watches for nothing: a data loader's
worker ends when it is told to.

Where `jax.distributed` runs, its preemption service catches SIGTERM in whichever process gets it, and agrees on a call
that all processes have yet to reach: there it is polled at every call, by the number of the call (it compares for
equality, so step numbers that skip would miss it). Calls of all watches are counted together, in the order they have
in every process, and all that stand when one of them reaches that call are told. No handler is installed for SIGTERM,
which would disable the service; those of other signals send the process a SIGTERM. With `jax_enable_preemption_service`
off, several processes watch for nothing, and say so: they could not agree on a step.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils

from flax_rpsave import _compat

logger = logging.getLogger("flax_rpsave")


_calls = itertools.count(1)
_watches: weakref.WeakSet[PreemptionWatch] = weakref.WeakSet()


class PreemptionWatch:
    """Watches for the announcement of a preemption.

    Args:
      signals: Names such as "SIGTERM"; None watches for nothing. Python installs handlers in the main thread only;
        elsewhere this is logged, and nothing but the preemption service is watched.
    """

    def __init__(self, signals: Sequence[str] | None):
        self.reason: str | None = None
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._closed = False
        self._came: set[int] = set()
        self._service = signals is not None and _compat.has_preemption_service()
        if signals and not self._service and jax.process_count() > 1:
            logger.warning(
                "preemption signals are not watched: jax_enable_preemption_service is off, so the processes could not "
                "agree on the step to save"
            )
            signals = None
        if self._service:
            signals = [name for name in signals or () if name != "SIGTERM"]
        if self._service or signals:
            _watches.add(self)
        if not signals:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning("preemption signals are not watched: the callback was not made in the main thread")
            return
        for name in signals:
            number = signal.Signals[name]
            self._before[number] = signal.signal(number, self._note)

    def poll(self) -> bool:
        """Whether the run is being preempted; call it once a step, in every process."""
        if self._service and multihost_utils.reached_preemption_sync_point(next(_calls)):
            for watch in _watches:
                watch.reason = "the preemption service"
        return self.reason is not None

    def close(self) -> None:
        """Puts the handlers back that were there before."""
        self._closed = True
        _watches.discard(self)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _watches_for(self, number: int) -> bool:
        return not self._closed and number in self._before and os.getpid() == self._process

    def _note(self, number: int, frame: Any) -> None:
        before, again = self._before.get(number), number in self._came
        self._came.add(number)
        watched = any(watch._watches_for(number) for watch in _watches)
        if self._watches_for(number):
            if self._service:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self.reason = signal.Signals(number).name
        elif before in (signal.SIG_DFL, None) and not watched:
            # Nobody watches (any more): the program ends, as it would without us.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # Python's own handler of SIGINT would end the loop before it has saved. A second one is from who will not wait.
        if callable(before) and (again or not watched or before is not signal.default_int_handler):
            before(number, frame)
