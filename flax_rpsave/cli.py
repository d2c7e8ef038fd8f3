"""The command `flax-rpsave`: what lies in a run's directory, what a checkpoint is made of, whether it is sound.

Reads only: nothing is written, cleaned or locked, and no device is touched.

    exit code   0   all is well (verify: what has a digest is what was written)
                1   verify: something is damaged; inspect: it cannot be read for that
                2   wrong usage, or nothing there
                3   the storage cannot be read now: denied, unreachable
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flax_rpsave.audit import Audit, audit
from flax_rpsave.commit import is_committed
from flax_rpsave.directory import Directory, brief, open_directory
from flax_rpsave.errors import ConfigError, CorruptCheckpointError, NoCheckpointError, RPSaveError
from flax_rpsave.store import new_context
from flax_rpsave.survey import LeafRow, Survey, checkpoints, list_steps, survey

_FINE, _DAMAGED, _NOTHING, _UNREADABLE = range(4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code.

    Args:
      arguments: The command line; None takes the program's.
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FINE
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (ConfigError, NoCheckpointError) as error:
        return _fail(error, _NOTHING)
    except CorruptCheckpointError as error:
        return _fail(error, _DAMAGED)
    except (RPSaveError, OSError) as error:
        return _fail(error, _UNREADABLE)
    return code


def _fail(error: object, code: int) -> int:
    text = brief(error) if isinstance(error, Exception) else str(error)
    print(f"flax-rpsave: error: {' '.join(text.split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flax-rpsave",
        description="Looks at checkpoints of flax_rpsave and of Orbax. Reads only.",
        epilog="exit codes: 0 all is well, 1 something is damaged, 2 wrong usage or nothing there, "
        "3 the storage cannot be read now",
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run: Callable[[argparse.Namespace], int], path: str, what: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=what, description=what, epilog=parser.epilog)
        command.add_argument("path", metavar=path, help="a path, s3://bucket/… or gs://bucket/…")
        command.add_argument("--json", action="store_true", help="one JSON document instead of a table")
        command.set_defaults(run=run)
        return command

    add("ls", _ls, "DIR", "lists the steps of a run: committed, incomplete, moved aside")
    inspect = add("inspect", _inspect, "DIR[/STEP]", "lists the leaves of a step, by default of the newest committed")
    verify = add("verify", _verify, "DIR[/STEP]", "compares every chunk, database node and document with its digest")
    for command in (inspect, verify):
        command.add_argument("--item", help="item in the step's directory; by default the only one there is")
    return parser


def _open(options: argparse.Namespace) -> Directory:
    return open_directory(options.path, new_context())


def _ls(options: argparse.Namespace) -> int:
    directory = _open(options)
    rows = list_steps(directory)
    if options.json:
        _print_json({"directory": str(directory), "steps": [dataclasses.asdict(row) for row in rows]})
        return _FINE
    _print_table(
        ["step", "state", "committed", "size", "metrics", "directory"],
        [
            [
                "-" if row.step is None else str(row.step),
                row.state if row.ours or row.state != "committed" else "committed (Orbax)",
                _date(row.committed_ns),
                "?" if row.nbytes is None else _size(row.nbytes),
                ", ".join(f"{name}={_number(value)}" for name, value in row.metrics.items()) or "-",
                row.name,
            ]
            for row in rows
        ],
        right=(0, 3),
    )
    return _FINE


def _inspect(options: argparse.Namespace) -> int:
    step, directory = list(checkpoints(_open(options)).items())[-1]
    found = survey(directory, step, options.item, new_context())
    if options.json:
        _print_json(dataclasses.asdict(found))
        return _FINE
    print(_heading(found))
    _print_table(
        ["leaf", "dtype", "shape", "chunk", "size", "chunks", "writers", "codecs", "sharding"],
        [
            [
                row.path,
                _dtype(row),
                "-" if row.shape is None else str(list(row.shape)),
                "-" if row.chunk_shape is None else str(list(row.chunk_shape)),
                _size(row.nbytes),
                str(row.chunks),
                _ranges(row.writers),
                "+".join(row.codecs) or "-",
                row.sharding or "-",
            ]
            for row in found.leaves
        ],
        right=(4, 5),
    )
    return _FINE


def _heading(found: Survey) -> str:
    own = found.own
    size = _size(sum(row.nbytes for row in found.leaves))
    digests = "with digests" if found.digests else "without digests"
    writer = "written by stock Orbax"
    if own:
        versions = ", ".join(f"{name} {version}" for name, version in own.get("versions", {}).items())
        writer = (
            f"written by {versions or 'flax_rpsave'}; format {own.get('format')}, processes: {own.get('processes')}"
        )
    return f"{found.item}\n{len(found.leaves)} leaves, {size}, {found.format}, {digests}\n{writer}\n"


def _verify(options: argparse.Namespace) -> int:
    found = []
    for step, directory in checkpoints(_open(options)).items():
        # A context of its own for each: what was read of another checkpoint is of no use any more.
        try:
            result = audit(directory, step, options.item, new_context())
        except NoCheckpointError:
            if directory.exists() and is_committed(directory):
                raise
            continue  # the run's retention has deleted it meanwhile
        if result.faults and not (directory.exists() and is_committed(directory)):
            continue  # likewise
        found.append(result)
        if not options.json:
            print(_verdict(result), flush=True)
    damaged = [result for result in found if result.faults]
    sound = [result.step for result in found if not result.faults]
    if options.json:
        steps = [{**dataclasses.asdict(result), "state": _state(result)} for result in found]
        _print_json({"damaged": len(damaged), "checkpoints": steps})
    elif len(found) > 1 and damaged:
        print(
            f"{len(damaged)} of {len(found)} steps are damaged; "
            + (f"the newest that verifies is {sound[-1]}" if sound else "none verifies")
        )
    return _DAMAGED if damaged else _FINE


def _state(result: Audit) -> str:
    if result.faults:
        return "damaged"
    return "not verifiable" if result.unverified else "sound"


def _verdict(result: Audit) -> str:
    checked = result.checked
    name = result.directory if result.step is None else f"step {result.step}"
    counts = ", ".join(f"{checked[what]} {what}" for what in ("leaves", "chunks", "nodes", "documents"))
    lines = [f"{name}: {_state(result)}; good are {counts}, {_size(checked['bytes'])}"]
    if result.unverified:
        lines.append(
            f"  {result.unverified} chunks have no digest (stock Orbax and `checksum: false` store none): they are "
            "there and could be read, but other values in them would not be noticed"
        )
    for fault in result.faults:
        leaf = "" if fault.leaf is None else f", leaf {fault.leaf}"
        lines.append(f"  {fault.file or '(the directory)'}{leaf}: {' '.join(fault.reason.split())}")
    return "\n".join(lines)


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinity, for which JSON has no words."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_json(value: Any) -> None:
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _print_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int]) -> None:
    table = [head, *rows]
    widths = [max(len(row[k]) for row in table) for k in range(len(head))]
    for row in table:
        cells = [
            text.rjust(w) if k in right else text.ljust(w) for k, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _dtype(row: LeafRow) -> str:
    if row.dtype is None:
        return row.kind
    return row.dtype if row.key_impl is None else f"key<{row.key_impl}> as {row.dtype}"


def _date(ns: int | None) -> str:
    if ns is None:
        return "-"
    return datetime.datetime.fromtimestamp(ns / 1e9, datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _size(nbytes: float) -> str:
    """Bytes with three digits: 1.49 GB is 1.49 × 10⁹."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "-"


if __name__ == "__main__":
    sys.exit(main())
