"""What the processes of a run tell each other: over the coordination service, in the background, with deadlines.

A *channel* is one exchange, such as one save: the same in every process by its name. There is no barrier and no device
collective: each process says what it has to say and goes on; whoever needs the others' words waits for them, at most
until a deadline, and names who has not spoken. Process 0 alone decides. In a program of one process nothing is sent.

    process 0                               process p
    open ("you may write")  ───────────────→  opened
    … writes …                                … writes …
    collect                 ←───────────────  report(what was written | why not)
    decide(None | why not)  ───────────────→  hear
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from flax_rpsave import _compat, errors
from flax_rpsave.errors import CommitTimeoutError, CorruptCheckpointError, RPSaveError, SaveError

logger = logging.getLogger("flax_rpsave")

_POLL_SECS = 0.5  # how long one request waits: a failure elsewhere is noticed within this time
_PROGRESS_SECS = 30.0  # how often a wait for others says that it still waits
_names = itertools.count()


class Group:
    """The processes of a run, as one owner of channels knows them.

    Owners are numbered in the order of their making, which must be the same in every process.

    Args:
      timeout_secs: How long process 0 waits for the others.
    """

    def __init__(self, timeout_secs: float):
        self.process = jax.process_index()
        self.processes = jax.process_count()
        self.timeout_secs = timeout_secs
        self._name = f"rpsave/{next(_names)}"
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

    def forget(self, key: str) -> None:
        """Removes the words of a channel that every process has left: of the one before the last one."""
        self._ended.append(key)
        if self.decides and len(self._ended) > 1:
            try:
                _compat.coordination_client().key_value_delete(self._ended.pop(0) + "/")
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
        key, secs = f"{self._key}/open", 2 * self._group.timeout_secs
        return json.loads(self._wait(key, secs, "process 0 did not begin", or_failure=True))

    def report(self, word: Mapping[str, Any] | None, failure: str | None = None) -> None:
        """Says what this process did, or why it failed; only the first time counts."""
        if self._group.processes > 1 and not self._reported:
            self._reported = True
            text = json.dumps({"word": word, "failure": failure})
            self._client.key_value_set(f"{self._key}/report/{self._group.process}", text)

    def give_up(self, error: BaseException) -> SaveError | None:
        """Tells the others that this process has failed; returns a failure of theirs that came before."""
        try:
            if self._group.decides:
                self.decide(failure=error)
                return None
            earlier = self.failed()
            self.report(None, failure=str(error))
        except jax.errors.JaxRuntimeError as unheard:
            logger.warning("%s: the other processes could not be told: %s", self._what, unheard)
            return None
        return earlier

    def collect(self, own: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The words of all processes, by process; process 0 calls this after its own report.

        Raises:
          SaveError: A process reported a failure.
          CommitTimeoutError: Processes did not report in time.
        """
        if self._group.processes == 1:
            return [own]
        prefix = f"{self._key}/report/"
        began = told = time.monotonic()
        deadline = began + self._group.timeout_secs
        while True:
            reports = {int(k.rpartition("/")[2]): json.loads(v) for k, v in self._client.key_value_dir_get(prefix)}
            for process in sorted(reports):
                if (failure := reports[process]["failure"]) is not None:
                    raise SaveError(f"{self._what}: process {process} failed: {failure}")
            missing = [p for p in range(self._group.processes) if p not in reports]
            if not missing:
                return [reports[p]["word"] for p in range(self._group.processes)]
            left = deadline - time.monotonic()
            if left <= 0:
                raise CommitTimeoutError(
                    f"{self._what}: process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not "
                    f"report within {self._group.timeout_secs:g} s (commit_timeout_secs)"
                )
            if (now := time.monotonic()) - told >= _PROGRESS_SECS:
                told = now
                logger.warning(
                    "%s: waiting for process%s %s since %.0f s",
                    self._what, "es" if len(missing) > 1 else "", ", ".join(map(str, missing)), now - began,
                )  # fmt: skip
            self._try_get(f"{prefix}{missing[0]}", min(left, _POLL_SECS))

    def decide(self, word: Any = None, failure: BaseException | None = None) -> None:
        """Process 0 says how it ended."""
        if self._group.processes > 1:
            decision = {"word": word, "failure": None if failure is None else [type(failure).__name__, str(failure)]}
            self._client.key_value_set(f"{self._key}/decision", json.dumps(decision))
            self._group.forget(self._key)

    def hear(self) -> Any:
        """Waits for process 0's decision; returns its word.

        Raises:
          SaveError: The decision is a failure; of process 0's kind where that is a `SaveError`.
          CommitTimeoutError: Nothing was heard: how it ended is unknown.
        """
        # Process 0 may begin to wait later than this process by as long as its own write takes.
        decision = json.loads(
            self._wait(
                f"{self._key}/decision",
                2 * self._group.timeout_secs + 30,
                "process 0 was not heard of, so how this ended is unknown",
            )
        )
        if (failure := _failure_of(decision)) is not None:
            raise failure
        return decision["word"]

    def failed(self) -> SaveError | None:
        """Why process 0 has given up, if it has by now."""
        if self._group.processes == 1 or (decision := self._try_get(f"{self._key}/decision", 0)) is None:
            return None
        return _failure_of(json.loads(decision))

    def share(self, word: Any) -> list[Any]:
        """Every process says a word and gets those of all, by process.

        Raises:
          CommitTimeoutError: One did not report in time.
        """
        own = {"shared": word}
        if self._group.processes == 1:
            return [word]
        self.report(own)
        if not self._group.decides:
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
          CommitTimeoutError: A process did not get through the block in time.
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

    def _wait(self, key: str, secs: float, otherwise: str, *, or_failure: bool = False) -> str:
        deadline = time.monotonic() + secs
        while (left := deadline - time.monotonic()) > 0:
            if (value := self._try_get(key, min(left, _POLL_SECS))) is not None:
                return value
            if or_failure and (failure := self.failed()) is not None:
                raise failure
        raise CommitTimeoutError(f"{self._what}: {otherwise} within {secs:g} s")

    def _try_get(self, key: str, secs: float) -> str | None:
        """A key's value, or None where there is none within some seconds."""
        try:
            return str(self._client.blocking_key_value_get(key, max(1, int(secs * 1000))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise


def _failure_of(decision: Mapping[str, Any]) -> SaveError | None:
    """Process 0's error, of the same kind where that is a `SaveError`."""
    if decision["failure"] is None:
        return None
    name, text = decision["failure"]
    kind = getattr(errors, name, SaveError)
    return kind(text) if issubclass(kind, SaveError) else SaveError(text)
