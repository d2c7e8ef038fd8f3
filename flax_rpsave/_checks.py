"""The checks that config fields declare, and the base of the blocks that runs them.

A check reads one value and says what it must be. `Block` runs those of all fields, at construction and from a mapping,
and collects every problem before one `ConfigError` reports them.
"""

import dataclasses
import numbers
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flax_rpsave import _foreign
from flax_rpsave._foreign import shown
from flax_rpsave.errors import ConfigError

Problem = tuple[str, str]
"""(dotted key, what is wrong with it)."""


class InvalidError(Exception):
    """One or more problems of a block, before they are worded as one `ConfigError`."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        super().__init__()
        self.problems = list(problems)


@dataclass(frozen=True)
class Check:
    """What a field accepts."""

    must: str
    """Completes "must be …"."""
    read: Callable[[Any], object]
    """Returns the value to keep; raises ValueError with a hint, which may be empty."""
    nullable: bool = False

    def __call__(self, key: str, value: object) -> object:
        if value is None and self.nullable:
            return None
        try:
            return self.read(value)
        except ValueError as error:
            hint = str(error) or _foreign.hint_for_value(_last(key), value, nullable=self.nullable)
            must = f"null or {self.must}" if self.nullable else self.must
            raise InvalidError([(key, f"must be {must}, got {shown(value)}" + (f": {hint}" if hint else ""))]) from None


_MOST = 10**9  # seconds or GB; the runtime takes milliseconds in 64 bits


def boolean() -> Check:
    """Accepts booleans only: 0 and 1 are none."""

    def read(value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(_foreign.boolean_meant(value))
        return value

    return Check("true or false", read)


def integer(minimum: int, *, nullable: bool = False) -> Check:
    """Accepts integers, NumPy's too, but neither booleans nor floats of integral value."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < minimum:
            raise ValueError(_foreign.number_meant(value, whole=True, least=minimum))
        return int(value)

    return Check(f"an integer of at least {minimum}", read, nullable)


def positive(*, nullable: bool = False) -> Check:
    """Accepts integers and floats above 0, NumPy's too, that can still be converted to other units."""

    def read(value: Any) -> float:
        number: Any = value
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < number <= _MOST:
            raise ValueError(_foreign.number_meant(value, whole=False))
        return int(value) if isinstance(value, numbers.Integral) else float(value)

    return Check(f"a finite number of at most {_MOST:,} and above 0", read, nullable)


def one_of(*choices: str, nullable: bool = False) -> Check:
    """Accepts these words."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(_foreign.close_match(value, choices))
        return value

    return Check(" or ".join(choices), read, nullable)


def text() -> Check:
    """Accepts text that is not blank."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError
        return value

    return Check("a name (text)", read)


def item_name() -> Check:
    """Accepts, or None, a file name that means nothing else to Orbax and needs no quoting on any storage."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?", value):
            raise ValueError
        if len(value) > 200:
            raise ValueError("file systems take names of up to 255 characters, and Orbax's temporary ones are longer")
        if value in ("metrics", "_CHECKPOINT_METADATA", "commit_success.txt") or ".orbax-checkpoint-tmp" in value:
            raise ValueError("Orbax gives that name to something else in a step's directory")
        return value

    return Check("a plain file name (letters, digits, `_`, `-`, inner `.`)", read, nullable=True)


# The first two never reach a program. The others are faults: after a Python handler the same instruction faults again.
_NOT_CATCHABLE = frozenset({"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"})
_CATCHABLE = frozenset(signal.Signals.__members__) - _NOT_CATCHABLE


def signal_names() -> Check:
    """Accepts a list of names or `signal.Signals` members; keeps a tuple of names."""

    def read(value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"write [{value}]" if isinstance(value, str) else "[] names none")
        return tuple(map(read_one, value))

    def read_one(value: object) -> str:
        name = value.name if isinstance(value, signal.Signals) else value
        if isinstance(name, str) and name in _NOT_CATCHABLE:
            raise ValueError(f"{name} cannot be caught by a program; SIGTERM is what schedulers send first")
        if not isinstance(name, str) or name not in _CATCHABLE:
            raise ValueError(f"{shown(value)} is not a signal's name; {_foreign.signal_meant(value, _CATCHABLE)}")
        return name

    return Check("a list of names of signals", read)


def directory() -> Check:
    """Accepts a path or URL, and nothing (None or empty): whether there must be one depends on other fields."""
    return Check("a path, gs://… or s3://…", _resolved)


def _resolved(value: object) -> str:
    """The directory as an absolute path or URL without a trailing slash: a later chdir does not move it."""
    raw = os.fspath(value) if isinstance(value, os.PathLike) else value
    if raw is None or raw == "":
        return ""
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError

    def variable(match: re.Match[str]) -> str:
        content = os.environ.get(match[1] or match[2])
        if not content:  # an empty one would make $SCRATCH/run1 a directory of the root
            raise ValueError(f"the environment variable {match[0]} is not set, or empty")
        return content

    path = re.sub(r"\$(?:(\w+)|\{(\w+)\})", variable, raw)
    if path != path.strip() or not path.isprintable():
        raise ValueError("spaces around it, line breaks and control characters are taken for mistakes")
    if scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", path):
        if scheme[1] not in ("gs", "s3"):
            remedy = "leave file:// away" if scheme[1].lower() == "file" else "nothing else is supported"
            raise ValueError(f"{scheme[1]}:// is not supported; {remedy}: a path, gs:// and s3:// work")
        if not re.match(r"(?:gs|s3)://[^/]", path):
            raise ValueError(f"write {scheme[1]}://bucket/…; a pathlib.Path drops one of the two slashes")
        path = path.rstrip("/")
        if {"", ".", ".."}.intersection(path.split("/")[3:]):
            raise ValueError("object stores take `.`, `..` and `//` as they stand; leave them out")
        return path
    path = os.path.expanduser(path)
    if path.startswith("~"):
        raise ValueError("there is no such user")
    return os.path.abspath(path)


class Block:
    """Base of the blocks, which are frozen dataclasses: checks every field at construction."""

    _key: ClassVar[str]
    """The dotted key of the block where the section has its usual name."""

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in _fields(type(self))}
        try:
            kept = checked(type(self), values, self._key)
        except InvalidError as invalid:
            raise worded(invalid.problems) from None
        for name, value in kept.items():
            object.__setattr__(self, name, value)

    @classmethod
    def _conflicts(cls, values: Mapping[Any, object]) -> Iterator[Problem]:
        """Yields (field, what is wrong) where fields do not go together; `values` may lack those with a default."""
        yield from ()


@dataclass(frozen=True)
class Nested:
    """The check of a field that is a block: an instance, or a mapping that becomes one."""

    block: type[Block]
    nullable: bool = False

    def __call__(self, key: str, value: object) -> object:
        if isinstance(value, self.block) or (value is None and self.nullable):
            return value
        if isinstance(value, Mapping):
            return self.block(**checked(self.block, value, key))
        hint = _foreign.hint_for_value(_last(key), value, nullable=self.nullable)
        raise InvalidError([(key, f"must be {'null or ' * self.nullable}a mapping, got {shown(value)}: {hint}")])


def setting(check: Check | Nested, *default: object) -> Any:
    """A field with its check; without a default it must be given."""
    return field(default=default[0] if default else dataclasses.MISSING, metadata={"check": check})


def _fields(block: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(block)}


def _keys() -> dict[str, list[str]]:
    """Block, by its dotted key inside the section → its keys."""
    return {_inside(block): list(_fields(block)) for block in Block.__subclasses__()}


def _inside(block: type[Block]) -> str:
    return block._key.partition(".")[2]


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def checked(block: type[Block], values: Mapping[Any, object], prefix: str) -> dict[str, Any]:
    """The keyword arguments for `block` that `values` mean, each passed through the check of its field.

    Args:
        block: the dataclass to make.
        values: field → value.
        prefix: the dotted key of the block, for messages.

    Raises:
        InvalidError: with every problem, not just the first.
    """
    fields = _fields(block)
    result: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in values.items():
        key = f"{prefix}.{name if isinstance(name, str) else shown(name)}"
        if name not in fields:
            problems.append((key, _foreign.unknown_key(name, _inside(block), _keys())))
            continue
        try:
            result[name] = fields[name].metadata["check"](key, value)
        except InvalidError as invalid:
            problems += invalid.problems
    for name, f in fields.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            problems.append((f"{prefix}.{name}", f"is missing: it must be {f.metadata['check'].must}"))
    problems += [(f"{prefix}.{name}", problem) for name, problem in block._conflicts(values)]
    if problems:
        raise InvalidError(problems)
    return result


def worded(problems: list[Problem], where: Callable[[str], str] = lambda key: "") -> ConfigError:
    """One error of all `problems`; `where` says the place of a key in a file."""
    lines = [f"{where(key)}{key} {problem}" for key, problem in problems]
    return ConfigError(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems:", *lines]))
