"""What the processes of a run tell each other: over the coordination service, in the background, with deadlines.

A *channel* is one exchange, such as one save: the same in every process by its name. There is no barrier and no device
collective: each process says what it has to say and goes on; whoever needs the others' words waits for them, at most
until a deadline, and names who has not spoken. Process 0 alone decides. In a program of one process nothing is sent.

    process 0                               process p
    open ("you may write")  ───────────────→  opened
    … writes …                                … writes …
    collect                 ←───────────────  report(what was written | why not)
    decide(None | why not)  ───────────────→  hear

Deadlines begin when a process has done its own part. A process that gives up waiting for process 0 to begin says so,
and that process 0 has decided against something stays on the service: whoever comes late hears at once that it is over,
and is in time for what comes next.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from flax_rpsave import _compat, errors
from flax_rpsave.errors import CommitTimeoutError, CorruptCheckpointError, RPSaveError, SaveError

logger = logging.getLogger("flax_rpsave")

_POLL_SECS = 0.5  # how long one request waits: a failure elsewhere is noticed within this time
_PROGRESS_SECS = 30.0  # how often a wait for others says that it still waits
_REASON_CHARACTERS = 1000  # of why a process takes no part: errors may be long, and the others ask twice a second
_numbers = itertools.count()


def stand_aside() -> None:
    """Takes the number that a `Group` would have had in this process, and says so to those that will wait for it."""
    _say_absent(_next_name(), "checkpoint.enabled is false there; it must be the same in all processes")


def _next_name() -> str:
    return f"rpsave/{next(_numbers)}"


def _say_absent(group: str, why: str) -> None:
    if (client := _compat.coordination_client()) is not None:
        client.key_value_set(f"{group}/absent/{jax.process_index()}", json.dumps(why[:_REASON_CHARACTERS]))


class Group:
    """The processes of a run, as one owner of channels knows them.

    Owners are numbered in the order of their making, which must be the same in every process: a directory may have
    another path in each, so it is no name.

    Args:
      timeout_secs: How long process 0 waits for the others, and each for process 0 to begin.
    """

    def __init__(self, timeout_secs: float):
        self.process = jax.process_index()
        self.processes = jax.process_count()
        self.timeout_secs = timeout_secs
        self._name = _next_name()
        self._channels: Counter[str] = Counter()
        self._ended: list[str] = []

    @property
    def decides(self) -> bool:
        """Whether this is process 0."""
        return self.process == 0

    def channel(self, what: str) -> Channel:
        """The next channel about something; every process must ask for it equally often.

        By what it is about, not by one count for all: should a step be saved by some processes only, they time out on
        that one, and meet again at the next.
        """
        self._channels[what] += 1
        return Channel(self, f"{self._name}/{what}/{self._channels[what]}", what)

    def forget(self, key: str, *, failed: bool) -> None:
        """Removes the words of a channel that has ended: of one that failed at once, else of the one before the last.

        That it failed is not removed: a process may not have begun with it yet.
        """
        if failed:
            self._remove(f"{key}/open", f"{key}/report/")
            return
        self._ended.append(key)
        if len(self._ended) > 1:
            self._remove(self._ended.pop(0) + "/")

    def leave(self, why: str) -> None:
        """Says that this process takes no part from here on, so that nobody waits for it."""
        try:
            _say_absent(self._name, why)
        except jax.errors.JaxRuntimeError as error:
            logger.debug("the other processes could not be told that this one leaves: %s", error)

    @contextlib.contextmanager
    def left_on_error(self, what: str) -> Iterator[None]:
        """Runs a block without which this process takes no part; where it fails, the others hear why."""
        try:
            yield
        except BaseException as error:
            self.leave(f"{what}: {error}")
            raise

    def absent(self) -> dict[int, str]:
        """The processes that take no part, as far as they have come, and why."""
        found = _compat.coordination_client().key_value_dir_get(f"{self._name}/absent/")
        return {int(key.rpartition("/")[2]): json.loads(why) for key, why in found}

    def _remove(self, *keys: str) -> None:
        try:
            for key in keys:
                _compat.coordination_client().key_value_delete(key)
        except jax.errors.JaxRuntimeError as error:
            logger.debug("the coordination service keeps old words: %s", error)


class Channel:
    """One exchange between the processes. Made by `Group.channel`.

    Args:
      group: The processes.
      key: Its name on the coordination service.
      what: What it is about, for messages: "step 100".
    """

    def __init__(self, group: Group, key: str, what: str):
        self._group = group
        self._key = key
        self._what = what
        self._reported = False

    def open(self, word: Any) -> None:
        """Process 0 lets the others begin, and tells them a word."""
        if self._group.processes > 1:
            self._client.key_value_set(f"{self._key}/open", json.dumps(word))

    def opened(self) -> Any:
        """Waits until process 0 has opened the channel; returns its word.

        Raises:
          SaveError: It has given up instead.
          CommitTimeoutError: It has done neither in time.
        """
        secs = 2 * self._group.timeout_secs
        if (word := self._wait(f"{self._key}/open", secs, begun=False)) is None:
            raise CommitTimeoutError(
                f"{self._what}: process 0 did not begin within {secs:g} s (twice commit_timeout_secs)"
            )
        return json.loads(word)

    def report(self, word: Mapping[str, Any] | None, failure: BaseException | None = None) -> None:
        """Says what this process did, or why it failed; only the first time counts."""
        if self._group.processes > 1 and not self._reported:
            self._reported = True
            self._set_report(word, failure)

    def give_up(self, error: BaseException) -> SaveError | None:
        """Tells the others that this process has failed; returns a failure of theirs that came before."""
        try:
            if self._group.decides:
                self.decide(failure=error)
                return None
            earlier = self.failed()
            self.report(None, failure=error)
        except jax.errors.JaxRuntimeError as unheard:
            logger.warning("%s: the other processes could not be told: %s", self._what, unheard)
            return None
        return earlier

    def collect(self, own: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The words of all processes, by process; process 0 calls this after its own report.

        Raises:
          SaveError: A process reported a failure; of its kind where that is a `SaveError`.
          CommitTimeoutError: Processes did not report in time.
        """
        if self._group.processes == 1:
            return [own]
        began = told = time.monotonic()
        deadline = began + self._group.timeout_secs
        while True:
            absent = self._group.absent()  # first: who has reported and left after that is not missing
            reports = self._reports()
            for process in sorted(reports):
                if (failure := reports[process]["failure"]) is not None:
                    kind, text = failure
                    raise _error(kind, f"{self._what}: process {process} failed: {text}")
            missing = self._missing(reports)
            if not missing:
                return [reports[p]["word"] for p in range(self._group.processes)]
            self._check_present(missing, absent)
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._too_late(missing)
            if (now := time.monotonic()) - told >= _PROGRESS_SECS:
                told = now
                logger.warning("%s: waiting for %s since %.0f s", self._what, _named(missing), now - began)
            self._try_get(f"{self._key}/report/{missing[0]}", min(left, _POLL_SECS))

    def decide(self, word: Any = None, failure: BaseException | None = None) -> None:
        """Process 0 says how it ended."""
        if self._group.processes > 1:
            decision = {"word": word, "failure": _told(failure)}
            self._client.key_value_set(f"{self._key}/decision", json.dumps(decision))
            self._group.forget(self._key, failed=failure is not None)

    def hear(self) -> Any:
        """Waits for process 0's decision; returns its word.

        Raises:
          SaveError: The decision is a failure; of process 0's kind where that is a `SaveError`.
          CommitTimeoutError: Nothing was heard: how it ended is unknown.
        """
        # Process 0 may begin to wait later than this process by as long as its own write takes.
        secs = 2 * self._group.timeout_secs + 30
        if (text := self._wait(f"{self._key}/decision", secs)) is None:
            raise CommitTimeoutError(
                f"{self._what}: process 0 was not heard of within {secs:g} s, so how this ended is unknown"
            )
        decision = json.loads(text)
        if (failure := _failure_of(decision)) is not None:
            raise failure
        return decision["word"]

    def failed(self) -> SaveError | None:
        """Why process 0 has given up, if it has by now."""
        if self._group.processes == 1:
            return None
        try:  # however busy the machine is: a wait with a short deadline may end before the answer is there
            decision = self._client.key_value_try_get(f"{self._key}/decision")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return _failure_of(json.loads(decision))

    def share(self, word: Any) -> list[Any]:
        """Every process says a word and gets those of all, by process.

        Raises:
          SaveError: Process 0 has given up, or one that is waited for takes no part.
          CommitTimeoutError: One did not report in time after this one.
        """
        own = {"shared": word}
        if self._group.processes == 1:
            return [word]
        self.report(own)
        if not self._group.decides:
            self._wait_for_process_0()
            return list(self.hear())
        try:
            words = [report["shared"] for report in self.collect(own)]
        except SaveError as error:
            self.decide(failure=error)
            raise
        self.decide(words)
        return words

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Runs a block in every process; where it fails in one, it fails in all, with one kind of error.

        Raises:
          RPSaveError: This process's error, or another's in its words. One that is no `CorruptCheckpointError` comes
            before one that is, so that all fall back, or none does.
          SaveError, CommitTimeoutError: See `share`.
        """
        own: BaseException | None = None
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised again below, after the others know
            own = error
        outcome = None if own is None else {"kind": type(own).__name__, "message": str(own)}
        try:
            outcomes = self.share(outcome)
        except RPSaveError as unheard:
            raise unheard from own
        failed = [(p, outcome) for p, outcome in enumerate(outcomes) if outcome is not None]
        failed.sort(key=lambda f: f[1]["kind"] == CorruptCheckpointError.__name__)
        if not failed:
            return
        process, first = failed[0]
        if own is not None and type(own).__name__ == first["kind"]:
            raise own
        kind = getattr(errors, first["kind"], RPSaveError)
        raise kind(f"process {process}: {first['message']}") from own

    @property
    def _client(self) -> Any:
        return _compat.coordination_client()

    def _wait_for_process_0(self) -> None:
        """Waits until process 0 has reported: from then on it is heard of.

        Where it has not in time, this process takes its own report back: process 0, once it comes, is not to go on
        with what this process has left. If it comes at that moment, what it decides counts.
        """
        if self._wait(f"{self._key}/report/0", self._group.timeout_secs, begun=False) is None:
            error = self._too_late(self._missing(self._reports()) or [0])
            self._set_report(None, error)
            if 0 not in self._reports():
                raise error

    def _set_report(self, word: Mapping[str, Any] | None, failure: BaseException | None) -> None:
        text = json.dumps({"word": word, "failure": _told(failure)})
        self._client.key_value_set(f"{self._key}/report/{self._group.process}", text, allow_overwrite=True)

    def _reports(self) -> dict[int, Mapping[str, Any]]:
        found = self._client.key_value_dir_get(f"{self._key}/report/")
        return {int(key.rpartition("/")[2]): json.loads(value) for key, value in found}

    def _missing(self, reports: Mapping[int, Any]) -> list[int]:
        return [p for p in range(self._group.processes) if p not in reports]

    def _check_present(self, missing: Iterable[int], absent: Mapping[int, str]) -> None:
        """Raises where one that is waited for will never come."""
        if gone := sorted({*missing}.intersection(absent)):
            raise SaveError(f"{self._what}: process {gone[0]} will not take part: {absent[gone[0]]}")

    def _too_late(self, missing: Sequence[int]) -> CommitTimeoutError:
        return CommitTimeoutError(
            f"{self._what}: {_named(missing)} did not report within {self._group.timeout_secs:g} s "
            "(commit_timeout_secs); all must make the same callbacks in the same order, and call them at the same steps"
        )

    def _wait(self, key: str, secs: float, *, begun: bool = True) -> str | None:
        """Waits for a key that process 0 sets; None where it has not within some seconds.

        Args:
          key: The key.
          secs: How long to wait.
          begun: Whether process 0 is known to have begun. Else it may give up instead, which is asked for first: what
            it has said before does not count any more.

        Raises:
          SaveError: It has given up, or will not come.
        """
        deadline = time.monotonic() + secs
        while (left := deadline - time.monotonic()) > 0:
            absent = self._group.absent()  # first: what it has said before it left counts
            if not begun and (failure := self.failed()) is not None:
                raise failure
            if (value := self._try_get(key, min(left, _POLL_SECS))) is not None:
                return value
            self._check_present([0], absent)
        return None

    def _try_get(self, key: str, secs: float) -> str | None:
        """A key's value, or None where there is none within some seconds."""
        try:
            return str(self._client.blocking_key_value_get(key, max(1, int(secs * 1000))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise


def _named(processes: Sequence[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def _told(failure: BaseException | None) -> list[str] | None:
    """A failure as another process is told of it."""
    return None if failure is None else [type(failure).__name__, str(failure)]


def _error(name: str, text: str) -> SaveError:
    """Another process's error, of the same kind where that is a `SaveError`."""
    kind = getattr(errors, name, SaveError)
    return kind(text) if issubclass(kind, SaveError) else SaveError(text)


def _failure_of(decision: Mapping[str, Any]) -> SaveError | None:
    """Process 0's error, if that is what it has decided."""
    return None if decision["failure"] is None else _error(*decision["failure"])
