"""Runs the tests of this package at full size, and writes what they found into docs/reliability.md.

Sizes, seed and figures are those of the tests: what fails here can be run alone, with the same variables.
"""

import argparse
import collections
import datetime
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree

from tests.faults.sizes import SEED_VARIABLE, SHARE_VARIABLE

ROOT = pathlib.Path(__file__).parents[2]
REPORT = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"
COUNTED = ("kills survived", "of them during a save", "faults injected", "saves of one run", "memory grown, MB",
           "mutants tried")  # fmt: skip
_HUNG = re.compile(r"Timeout|the interpreter ended with")


def commit() -> str:
    """The commit that is tested, `+` where files are changed."""
    try:
        said = [
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):  # a source archive
        return "unknown"
    return said[0] + "+" * bool(said[1])


def figures(results: ElementTree.Element) -> tuple[dict[str, dict[str, float]], collections.Counter[str]]:
    """What the tests recorded, by engine or layout, and how they ended."""
    found: dict[str, dict[str, float]] = {}
    ended: collections.Counter[str] = collections.Counter()
    for case in results.iter("testcase"):
        failure = next(iter(case.findall("failure") + case.findall("error")), None)
        text = "" if failure is None else f"{failure.get('message')}\n{failure.text}"
        skipped = case.find("skipped") is not None
        ended["tests"] += 1
        ended["failed"] += failure is not None
        ended["skipped"] += skipped
        ended["hangs or crashes"] += bool(_HUNG.search(text))
        ended["wrong values"] += '"outcome": "wrong"' in text or "is not that of step" in text
        where = re.search(r"\[(.*)\]", case.get("name", ""))
        for recorded in case.iter("property"):
            row = found.setdefault(where[1] if where else "", {})
            row[recorded.get("name", "")] = float(recorded.get("value", "0"))
    return found, ended


def table(found: dict[str, dict[str, float]]) -> list[str]:
    names = [name for name in COUNTED if any(name in row for row in found.values())]
    lines = ["| | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    for where in sorted(found, key=lambda name: (name.startswith("stock"), name)):
        lines.append(
            f"| {where} | " + " | ".join(f"{found[where][n]:g}" if n in found[where] else "" for n in names) + " |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--share", type=float, default=1.0, help="of the full size (default: 1); less is not reported")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)), help="of what is tried at random")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest-xdist; 0: without it (default: 2)")
    options, others = parser.parse_known_args()  # the others go to pytest
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "results.xml")
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "tests/faults", f"--junitxml={file}", "-o", "junit_family=xunit1",
             "-o", "faulthandler_timeout=0",  # they take minutes
             *(["--numprocesses", str(options.workers)] if options.workers else []), *others],
            cwd=ROOT,
            env={**os.environ, SHARE_VARIABLE: str(options.share), SEED_VARIABLE: str(options.seed)},
            check=False,
        ).returncode  # fmt: skip
        if not file.exists():
            return code or 1
        found, ended = figures(ElementTree.parse(file).getroot())
    versions = f"Python {sys.version.split()[0]}, " + ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("jax", "orbax-checkpoint", "tensorstore")
    )
    took = f"{(time.monotonic() - begun) / 60:.0f} minutes"
    summary = [
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, commit {commit()}, {versions}, seed {options.seed}, {took}:",
        "",
        *table(found),
        "",
        ", ".join(
            f"{name}: {ended[name]}" for name in ("tests", "failed", "skipped", "wrong values", "hangs or crashes")
        )
        + ".",
    ]
    print("\n".join(["", *summary]))
    if options.share >= 1 and not others:
        before, _, rest = REPORT.read_text().partition(BEGIN)
        REPORT.write_text("\n".join([before + BEGIN, *summary, END]) + rest.partition(END)[2])
        print(f"\nwritten to {REPORT.relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
