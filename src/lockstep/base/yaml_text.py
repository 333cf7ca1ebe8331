"""Read YAML configs with the location of every key, within limits on size, depth and aliases."""

import math
import os
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from lockstep.base import storage
from lockstep.base.errors import ConfigError, masked


class YamlLoader(yaml.SafeLoader):
    """Reads 1e-3 as a number, and 1:30 (in YAML 1.1 the number 90) as text."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Raise RecursionError before deep nesting takes long: the time is its square."""
        if len(self.states) > 2 * MOST_LEVELS:
            raise RecursionError
        return super().compose_node(parent, index)


class YamlDumper(yaml.SafeDumper):
    """Writes what YamlLoader reads back: quotes text that YamlLoader would take for something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Quote Unicode line breaks: PyYAML writes them unquoted and reads them back as spaces."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if set(text) & set(BREAKS) else None)


BREAKS = "\x85\u2028\u2029"
YamlDumper.add_representer(str, _represent_text)
EXPONENT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$")
SURROGATE = re.compile("[\ud800-\udfff]")
OCTAL = re.compile(r"[-+]?0[0-9_]+$")
for _class in (YamlLoader, YamlDumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
YamlLoader.yaml_implicit_resolvers = {
    first: [("tag:yaml.org,2002:str", SEXAGESIMAL), *known]  # first: the first match wins
    for first, known in YamlLoader.yaml_implicit_resolvers.items()
}

MOST_BYTES = 128 << 10
"""Size limit of a config file: 20 times the longest example, and what PyYAML reads in two seconds."""
MOST_VALUES = 20_000
"""Limit of the values in a config with its aliases (*a) expanded; long texts count more."""
MOST_LEVELS = 60
"""Limit of the depth of nested lists and mappings."""
TOO_DEEP = f"this is nested too deep (more than {MOST_LEVELS} levels), or an anchor (&) is used inside itself"
COMMAND_LINE = "command line"
"""The location of an override."""
LONGEST_VALUE = 60
"""Characters of a wrong value that a message shows."""
SCALARS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))
MERGE, TIMESTAMP = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:timestamp"
COLLECTIONS = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})
KeyPath = tuple[str, ...]
"""A key preceded by the sections that contain it."""


class KeyLocations:
    """Locations of keys: lines of a file, or the command line."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.by_key: dict[KeyPath, str] = {(): file}
        self.values = 0
        """Values read so far, with aliases expanded."""

    def find(self, path: KeyPath) -> str:
        """Return the location of a key, or of the nearest section around it that has one."""
        while path not in self.by_key:
            path = path[:-1]
        return self.by_key[path]

    def replace(self, path: KeyPath, location: str) -> None:
        """Set the location of an overridden key, and drop those of all keys below it."""
        self.by_key = {key: old for key, old in self.by_key.items() if key[: len(path)] != path}
        self.by_key[path] = location

    def line(self, node: yaml.Node) -> str:
        return self.file if self.file == COMMAND_LINE else f"{self.file}:{node.start_mark.line + 1}"

    def count(self, node: yaml.Node, path: KeyPath) -> None:
        """Count a value. Raises ConfigError where there are too many, or nested too deep."""
        self.values += 1 + (len(node.value) // 100 if isinstance(node, yaml.ScalarNode) else 0)
        if self.values > MOST_VALUES:
            raise ConfigError(
                f"{self.line(node)}: {self.file} holds more than {MOST_VALUES:,} values once its aliases (*) are "
                "written out: no config needs that many"
            )
        if len(path) > MOST_LEVELS:
            raise ConfigError(f"{self.line(node)}: {_at(path[:2])}{TOO_DEEP}")


def short(value: Any) -> str:
    """Format a value for a message, truncated."""
    text = masked(repr(value)) if not isinstance(value, int) or abs(value) < 10**LONGEST_VALUE else f"{hex(value)}"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def read_file(path: Path) -> str:
    """Read a config file. Raises ConfigError if it is missing, not a regular file, too large or not UTF-8."""
    if os.path.isdir(path):  # for any name, unlike Path.is_dir
        raise ConfigError(f"{path} is a folder: name the YAML file (that of a run is RUN/recipe.yaml)")
    try:
        data = storage.read_regular(path, MOST_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; `lockstep init` writes one to start from") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:  # a zero byte in the name
        raise ConfigError(f"{str(path)!r} cannot be the name of a file") from None
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not a YAML file: byte {error.start} is not UTF-8 text; save it as UTF-8"
        ) from None


def read(text: str, locations: KeyLocations, path: KeyPath = ()) -> Any:
    """Parse YAML, recording the location of each key. Raises ConfigError."""
    depths = accumulate((character in "[{") - (character in "]}") for character in text)
    if max(depths, default=0) > 10 * MOST_LEVELS:  # PyYAML would take seconds to say so
        raise ConfigError(f"{locations.file}: {TOO_DEEP}")
    try:
        node = yaml.compose(text, Loader=YamlLoader)
        return None if node is None else _value(node, path, locations)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        advice = "; indent with spaces, not with tabs" if r"'\t'" in str(error.problem) else ""
        context = f" ({error.context} of line {error.context_mark.line + 1})" if error.context_mark else ""
        raise ConfigError(f"{locations.file}{line}: this is not YAML: {error.problem}{context}{advice}") from None
    except yaml.reader.ReaderError as error:
        line = f":{text.count(chr(10), 0, error.position) + 1}"
        raise ConfigError(
            f"{locations.file}{line}: this is not YAML: it holds the character {chr(error.character)!r}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{locations.file}: {TOO_DEEP}") from None


def scalar_or_text(text: str, path: KeyPath) -> Any:
    """Parse the value of an override as YAML; what is not YAML is text, and so is what YAML would leave out as a
    comment. Raises ConfigError."""
    _check_text("".join(path), f"{COMMAND_LINE}: a key ")
    _check_text(text, f"{COMMAND_LINE}: {_at(path)}")
    try:
        node = yaml.compose(text, Loader=YamlLoader)
    except (yaml.YAMLError, RecursionError):
        return text
    if (node.end_mark.index if node else 0) < len(text.rstrip()):
        return text
    return None if node is None else _value(node, path, KeyLocations(COMMAND_LINE))


def _value(node: yaml.Node, path: KeyPath, locations: KeyLocations) -> Any:
    locations.count(node, path)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, path, locations)
    if node.tag not in COLLECTIONS:
        raise ConfigError(f"{locations.line(node)}: {_at(path)}the tag {short(node.tag)} is not known: leave it out")
    if isinstance(node, yaml.SequenceNode):
        return [_value(child, (*path, str(i)), locations) for i, child in enumerate(node.value)]
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, line = _key(key_node, path, locations), locations.line(key_node)
        _check_text(key, f"{line}: a key ")
        if key in mapping:
            first = locations.by_key[*path, key]
            raise ConfigError(f"{line}: {'.'.join((*path, key))} is given twice (first in {first})")
        locations.by_key[*path, key] = line
        mapping[key] = _value(value_node, (*path, key), locations)
    return mapping


def _key(node: yaml.Node, path: KeyPath, locations: KeyLocations) -> str:
    line = locations.line(node)
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{line}: a key should be a word, not a list or a mapping")
    if node.tag == MERGE:
        raise ConfigError(f"{line}: {_at(path)}merging (<<) is not known here: write the keys out")
    return str(node.value)


def _date(text: str, prefix: str, *, is_meant: bool) -> str:
    if not is_meant:
        raise ConfigError(f"{prefix}{short(text)} is a date to YAML: put it in quotes, if it is meant as text")
    return text


def _scalar(node: yaml.ScalarNode, path: KeyPath, locations: KeyLocations) -> Any:
    prefix, kind = f"{locations.line(node)}: {_at(path)}", node.tag.rpartition(":")[2]
    if node.tag == TIMESTAMP and node.style is None:
        return _date(node.value, prefix, is_meant=path[-1:] == ("date",))
    if node.tag not in SCALARS:
        raise ConfigError(f"{prefix}the tag {short(node.tag)} is not known: leave it out")
    if kind == "int" and OCTAL.match(node.value):
        plain = node.value.replace("_", "").lstrip("+-0") or "0"
        raise ConfigError(
            f"{prefix}{short(node.value)} is an octal number to YAML: write {plain}, or put it in quotes, if it is text"
        )
    loader = YamlLoader("")
    try:
        value = loader.construct_object(node, deep=True)
    except (ValueError, LookupError, AttributeError):  # raised by PyYAML for `0x_`, `!!bool maybe`
        raise ConfigError(f"{prefix}{short(node.value)} cannot be read as YAML's {kind}") from None
    finally:
        loader.dispose()
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{prefix}should be a finite number (value {value})")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{prefix}{short(value)} is no number that fits in 64 bits")
    if isinstance(value, str):
        _check_text(value, prefix)
    return value


def _check_text(text: str, prefix: str) -> None:
    """Raise ConfigError for unpaired surrogates, which no file and no terminal can take."""
    if surrogate := SURROGATE.search(text):
        raise ConfigError(f"{prefix}holds {surrogate[0]!r}, which is half a character: write it as UTF-8 text")


def _at(path: KeyPath) -> str:
    return f"{'.'.join(path)}: " if path else ""
