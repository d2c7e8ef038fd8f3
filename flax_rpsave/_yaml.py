"""A section of a YAML file, with what only the source text shows.

PyYAML reads YAML 1.1: `010` is 8, `1:30` is 90, and of two equal keys the last one wins without a word. None of it can
be seen in the values, so the nodes are looked at before they become values. Only the section itself is constructed:
tags that belong to other tools elsewhere in the file do no harm.
"""

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from flax_rpsave.errors import ConfigError

_TWICE = "stands twice, first on line {}; YAML keeps only the last"


@dataclass
class Section:
    """A section as read: its value, where each key stands, and what its text has wrong."""

    value: object
    lines: dict[str, int] = field(default_factory=dict)
    """Dotted key, the section's name first → line, from 1."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(dotted key, what is wrong)."""


def read_section(path: str | os.PathLike[str], section: str) -> Section:
    """Reads the top-level key `section` of the YAML file `path`.

    Raises:
        ConfigError: the file cannot be read, is not YAML or not a mapping, or has no such section or two of them.
    """
    file = os.fspath(path)
    try:
        with open(file, "rb") as stream:
            loader = yaml.SafeLoader(stream)
            try:
                root = loader.get_single_node()
                node, line = _find(root, section, file)
                result = Section(value=None, lines={section: line})
                for key, problem in _inspect(node, section, result.lines, set()):
                    result.problems.append((key, problem))
                result.value = loader.construct_document(node)
            finally:
                loader.dispose()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{file}:{mark.line + 1 if mark else '?'}: not valid YAML: {error.problem}") from error
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(f"{file}: is nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date, number or character that PyYAML lets through
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    return result


def _find(root: yaml.Node | None, section: str, file: str) -> tuple[yaml.Node, int]:
    """The section's node and the line of its key."""
    if root is None:
        raise ConfigError(f"{file}: is empty; it must hold a `{section}:` section")
    if not isinstance(root, yaml.MappingNode):
        kind = root.tag.rpartition(":")[2]
        raise ConfigError(f"{file}:{_line(root)}: must be a mapping with a `{section}:` section, got one {kind}")
    found = [(key, value) for key, value in root.value if key.value == section]
    if not found:
        names = [key.value for key, _ in root.value if isinstance(key, yaml.ScalarNode)]
        meant = difflib.get_close_matches(section, names, n=1)
        there = ", ".join(map(repr, names)) or "none"
        hint = f"; did you mean section={meant[0]!r}?" if meant else ""
        raise ConfigError(f"{file}: has no `{section}:` section; its top-level keys: {there}{hint}")
    if len(found) > 1:
        first, second = _line(found[0][0]), _line(found[1][0])
        raise ConfigError(
            f"{file}:{second}: `{section}:` stands twice, first on line {first}; YAML keeps only the last"
        )
    key, value = found[0]
    return value, _line(key)


def _inspect(node: yaml.Node, name: str, lines: dict[str, int], seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yields the problems of the text below `node` and enters the lines of its keys into `lines`."""
    if isinstance(node, yaml.CollectionNode):
        if id(node) in seen:  # an alias: aliases of aliases would be endless, or as good as that
            return
        seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        own: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for mapping in merged:
                    yield from _inspect(mapping, name, lines, seen)
                continue
            dotted = f"{name}.{key.value}"
            if dotted in own:
                yield dotted, _TWICE.format(own[dotted])
            own[dotted] = lines[dotted] = _line(key)
            yield from _inspect(value, dotted, lines, seen)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _inspect(item, name, lines, seen)
    elif isinstance(node, yaml.ScalarNode):
        trap = _number_trap(node)
        if trap:
            yield name, trap


def _number_trap(node: yaml.ScalarNode) -> str | None:
    """What is wrong with a plain number that YAML 1.1 reads as another one than it shows."""
    if node.tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
        return None
    text: str = node.value
    digits = text.lstrip("+-").replace("_", "")
    if ":" in text:
        return f"is written {text}, which YAML 1.1 reads in base 60; write it as one number, or quote it if it is text"
    if digits.startswith("0") and digits.isdigit() and len(digits) > 1:
        return (
            f"is written {text}, which YAML 1.1 reads as octal, {int(digits, 8)}; "
            f"write {digits.lstrip('0') or '0'}, or quote it if it is text"
        )
    return None


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
