"""YAML as people write configs: read with the place of every key, and bounded, whatever the file holds."""

import math
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from lockstep.base.errors import ConfigError


class YamlLoader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as people write it, and 1:30 (to YAML 1.1 the number 90) is text."""


class YamlDumper(yaml.SafeDumper):
    """Writes what Loader reads back: quotes around text that Loader would take for something else."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """PyYAML writes Unicode's own line breaks as they are, and reads them back as spaces."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if set(text) & set(BREAKS) else None)


BREAKS = "\x85\u2028\u2029"
YamlDumper.add_representer(str, _text)
EXPONENT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
SIXTIETHS = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$")
HALF = re.compile("[\ud800-\udfff]")
OCTAL = re.compile(r"[-+]?0[0-9_]+$")
for _class in (YamlLoader, YamlDumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
YamlLoader.yaml_implicit_resolvers = {
    first: [("tag:yaml.org,2002:str", SIXTIETHS), *known]  # before the others: the first that matches counts
    for first, known in YamlLoader.yaml_implicit_resolvers.items()
}

MOST_BYTES = 128 << 10
"""Of a config file: 20 times the longest example, and what PyYAML reads in two seconds."""
MOST_VALUES = 20_000
"""That a config may hold once its aliases (*a) are written out; a long text counts for more."""
DEEPEST = 60
"""Lists and mappings in one another."""
TOO_DEEP = f"this is nested too deep (more than {DEEPEST} levels), or an anchor (&) is used inside itself"
COMMAND_LINE = "command line"
"""The place of an override, which has no lines."""
LONGEST_VALUE = 60
"""Characters of a wrong value that are repeated in a complaint."""
SCALARS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))
MERGE, TIMESTAMP = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:timestamp"
COLLECTIONS = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})
SPECIAL = {
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}

Path_ = tuple[str, ...]
"""A key with the sections around it."""


class Places:
    """Where each key was written: a file's line, or the command line."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.of: dict[Path_, str] = {(): file}
        self.values = 0
        """How many have been read, aliases written out."""

    def find(self, path: Path_) -> str:
        """The place of a key, or of the nearest section around it that was written down."""
        while path not in self.of:
            path = path[:-1]
        return self.of[path]

    def replace(self, path: Path_, place: str) -> None:
        """A key was given anew: forget where it and all below it were first written."""
        self.of = {known: old for known, old in self.of.items() if known[: len(path)] != path}
        self.of[path] = place

    def line(self, node: yaml.Node) -> str:
        return self.file if self.file == COMMAND_LINE else f"{self.file}:{node.start_mark.line + 1}"

    def counted(self, node: yaml.Node, path: Path_) -> None:
        """Count one more value. Raises ConfigError where they are too many, or too deep in one another."""
        self.values += 1 + (len(node.value) // 100 if isinstance(node, yaml.ScalarNode) else 0)
        if self.values > MOST_VALUES:
            raise ConfigError(
                f"{self.line(node)}: {self.file} holds more than {MOST_VALUES:,} values once its aliases (*) are "
                "written out: no config needs so many"
            )
        if len(path) > DEEPEST:
            raise ConfigError(f"{self.line(node)}: {_at(path[:2])}{TOO_DEEP}")


def short(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**LONGEST_VALUE else f"{hex(value)}"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def read_file(path: Path) -> str:
    """The text of a config file. Raises ConfigError: not there, no plain file, too large, not UTF-8."""
    try:
        kind = path.stat()
        if special := next((name for is_one, name in SPECIAL.items() if is_one(kind.st_mode)), None):
            raise ConfigError(f"{path} is {special}: name a YAML file")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; `lockstep init` writes one to start from") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder: name the YAML file (that of a run is RUN/recipe.yaml)") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:  # a zero byte in its name
        raise ConfigError(f"{str(path)!r} cannot be the name of a file") from None
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path} is larger than {MOST_BYTES >> 10} KiB: this is no config")
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not a YAML file: byte {error.start} is not UTF-8 text; save it as UTF-8"
        ) from None


def read(text: str, places: Places, path: Path_ = ()) -> Any:
    """The value that a YAML text holds, with the place of each key. Raises ConfigError."""
    try:
        node = yaml.compose(text, Loader=YamlLoader)
        return None if node is None else _value(node, path, places)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        begun = f" ({error.context} of line {error.context_mark.line + 1})" if error.context_mark else ""
        raise ConfigError(f"{places.file}{line}: this is not YAML: {error.problem}{begun}") from None
    except yaml.reader.ReaderError as error:
        line = f":{text.count(chr(10), 0, error.position) + 1}"
        raise ConfigError(
            f"{places.file}{line}: this is not YAML: it holds the character {chr(error.character)!r}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{places.file}: {TOO_DEEP}") from None


def scalar_or_text(text: str, path: Path_) -> Any:
    """What is given for a key on a command line: YAML where it can be, else the text itself. Raises ConfigError."""
    _check_text("".join(path), f"{COMMAND_LINE}: a key ")
    _check_text(text, f"{COMMAND_LINE}: {_at(path)}")
    try:
        node = yaml.compose(text, Loader=YamlLoader)
    except (yaml.YAMLError, RecursionError):
        return text
    return None if node is None else _value(node, path, Places(COMMAND_LINE))


def _value(node: yaml.Node, path: Path_, places: Places) -> Any:
    places.counted(node, path)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, path, places)
    if node.tag not in COLLECTIONS:
        raise ConfigError(f"{places.line(node)}: {_at(path)}the tag {short(node.tag)} is not known: leave it out")
    if isinstance(node, yaml.SequenceNode):
        return [_value(child, (*path, str(i)), places) for i, child in enumerate(node.value)]
    out: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, here = _key(key_node, path, places), places.line(key_node)
        _check_text(key, f"{here}: a key ")
        if key in out:
            first = places.of[(*path, key)]
            raise ConfigError(f"{here}: {'.'.join((*path, key))} is given twice (first in {first})")
        places.of[(*path, key)] = here
        out[key] = _value(value_node, (*path, key), places)
    return out


def _key(node: yaml.Node, path: Path_, places: Places) -> str:
    here = places.line(node)
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{here}: a key should be a word, not a list or a mapping")
    if node.tag == MERGE:
        raise ConfigError(f"{here}: {_at(path)}merging (<<) is not known here: write the keys out")
    return str(node.value)


def _scalar(node: yaml.ScalarNode, path: Path_, places: Places) -> Any:
    here, kind = f"{places.line(node)}: {_at(path)}", node.tag.rpartition(":")[2]
    if node.tag == TIMESTAMP and node.style is None:
        raise ConfigError(f"{here}{short(node.value)} is a date to YAML: put it in quotes, if it is meant as text")
    if node.tag not in SCALARS:
        raise ConfigError(f"{here}the tag {short(node.tag)} is not known: leave it out")
    if kind == "int" and OCTAL.match(node.value):
        plain = node.value.replace("_", "").lstrip("+-0") or "0"
        raise ConfigError(
            f"{here}{short(node.value)} is an octal number to YAML: write {plain}, or put it in quotes, if it is text"
        )
    loader = YamlLoader("")
    try:
        found = loader.construct_object(node, deep=True)
    except (ValueError, LookupError, AttributeError):  # PyYAML's own for `0x_`, `!!bool maybe`
        raise ConfigError(f"{here}{short(node.value)} cannot be read as YAML's {kind}") from None
    finally:
        loader.dispose()
    if isinstance(found, float) and not math.isfinite(found):
        raise ConfigError(f"{here}should be a finite number (value {found})")
    if isinstance(found, int) and not -(2**63) <= found < 2**63:
        raise ConfigError(f"{here}{short(found)} is no number that fits in 64 bits")
    if isinstance(found, str):
        _check_text(found, here)
    return found


def _check_text(text: str, here: str) -> None:
    """Raise ConfigError for halves of characters: no file and no terminal takes them."""
    if half := HALF.search(text):
        raise ConfigError(f"{here}holds {half[0]!r}, which is half a character: write it as UTF-8 text")


def _at(path: Path_) -> str:
    return f"{'.'.join(path)}: " if path else ""
