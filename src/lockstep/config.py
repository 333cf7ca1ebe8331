"""From one YAML file and overrides to a validated, frozen model; every complaint names file, line and remedy."""

import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lockstep.errors import ConfigError, nearest


class Section(BaseModel):
    """A part's own settings: frozen, no unknown keys; a field's meaning is the string under it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
    incidental: ClassVar[frozenset[str]] = frozenset()
    """Fields that can never change a bit of the weights (where files lie, how often to log)."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _no_switch_as_number(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """Python counts True as 1: `global_batch: yes` would train on single samples."""
        found = validate(value)
        if isinstance(value, bool) and isinstance(found, int | float) and not isinstance(found, bool):
            raise ValueError("should be a number")
        return found


class PluginSection(Section):
    """The settings of one plugin; `kind` is its file's name."""

    kind: str
    """Which one; `lockstep plugins` lists them."""


Root = TypeVar("Root", bound=Section)

LocalPath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
"""A path on this machine; a relative one counts from the folder the command is typed in."""


@dataclass(frozen=True)
class Kind:
    """Annotates a section whose model is the `Config` of the plugin that its `kind` names."""

    default: str
    find: Callable[[str], type[PluginSection]]
    """Name -> Config; raises ConfigError for an unknown name."""

    def config(self, value: Any) -> type[PluginSection]:
        """The Config class for a section's raw value; raises ConfigError for an unknown kind."""
        named = value.get("kind", self.default) if isinstance(value, dict) else self.default
        return self.find("" if named is None else str(named))

    def validate(self, value: Any) -> PluginSection:
        """Turn a raw mapping into the plugin's Config."""
        if isinstance(value, PluginSection):
            return value
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise PydanticCustomError("section_type", "{reason}", {"reason": INSTEAD["model_type"]})
        try:
            config = self.config(value)
        except ConfigError as error:
            raise PydanticCustomError("unknown_kind", "{reason}", {"reason": str(error)}) from None
        return config.model_validate({"kind": self.default, **value})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate by the plugin's own model, and dump by it too."""
        dump = core_schema.plain_serializer_function_ser_schema(lambda section: section.model_dump(mode="json"))
        return core_schema.no_info_plain_validator_function(self.validate, serialization=dump)


class Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as people write it, and a date or 1:30 (to YAML 1.1 the number 90) is text."""


class Dumper(yaml.SafeDumper):
    """Writes what Loader reads back: quotes around text that Loader would take for a number."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """PyYAML writes Unicode's own line breaks as they are, and reads them back as spaces."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if set(text) & set(BREAKS) else None)


BREAKS = "\x85\u2028\u2029"
Dumper.add_representer(str, _text)
EXPONENT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
SIXTIETHS = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$")
for _class in (Loader, Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
Loader.yaml_implicit_resolvers = {
    first: [
        ("tag:yaml.org,2002:str", SIXTIETHS),  # before the others: the first that matches counts
        *((tag, form) for tag, form in known if tag != "tag:yaml.org,2002:timestamp"),
    ]
    for first, known in Loader.yaml_implicit_resolvers.items()
}

INSTEAD = {
    "dict_type": "should be keys with values, such as {a: 1}",
    "model_type": "should be a section with keys of its own",
    "path_type": "should be the path of a file or folder",
    "string_type": "should be text: put it in quotes, and once more in quotes on a command line ('\"...\"')",
    "tuple_type": "should be a list, such as [a, b]",
}
"""What pydantic says in words of Python -> the same in words of YAML."""
LONGEST_VALUE = 60
"""Characters of a wrong value that are repeated in a complaint."""

Path_ = tuple[str, ...]
Complaint = tuple[Path_, str]
"""Where in the config (section, key) and what is wrong there."""


class Places:
    """Where each key was written: a file's line, or the command line."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.of: dict[Path_, str] = {(): file}

    def find(self, path: Path_) -> str:
        """The place of a key, or of the nearest section around it that was written down."""
        while path not in self.of:
            path = path[:-1]
        return self.of[path]

    def replace(self, path: Path_, place: str) -> None:
        """A key was given anew: forget where it and all below it were first written."""
        self.of = {known: old for known, old in self.of.items() if known[: len(path)] != path}
        self.of[path] = place


def load(
    root: type[Root],
    path: Path,
    overrides: Sequence[str] = (),
    *,
    check: Callable[[Root], list[Complaint]] = lambda _: [],
) -> Root:
    """Read a YAML file, apply `section.key=value` overrides and validate; `check` finds impossible combinations.

    Raises ConfigError with one line per complaint: file and line, key, value, and the nearest right name.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; `lockstep init` writes one to start from") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder: name the YAML file (that of a run is RUN/recipe.yaml)") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a YAML file: byte {error.start} is not UTF-8 text") from None
    return parse(root, text, file=str(path), overrides=overrides, check=check)


def parse(
    root: type[Root],
    text: str,
    *,
    file: str,
    overrides: Sequence[str] = (),
    check: Callable[[Root], list[Complaint]] = lambda _: [],
) -> Root:
    """The same for YAML text that is already in memory; `file` names it in messages."""
    places = Places(file)
    raw = _read(text, places)
    for override in overrides:
        _override(raw, override, places)
    raw = {name: section for name, section in raw.items() if section is not None}
    try:
        found = root.model_validate(raw)
    except ValidationError as error:
        complaints = _complaints(root, raw, error)
    else:
        complaints = check(found)
        if not complaints:
            return found
    lines = [f"{places.find(p)}: {'.'.join(p)}: {what}" for p, what in complaints]
    raise ConfigError("\n".join(line.replace("\n", "\\n") for line in lines))


def dump(section: Section) -> str:
    """YAML text that `load` reads back to an equal section."""
    return yaml.dump(section.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _read(text: str, places: Places) -> dict[str, Any]:
    try:
        node = yaml.compose(text, Loader=Loader)
        raw = None if node is None else _value(node, (), places)
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
        raise ConfigError(f"{places.file}: this is nested too deep, or an anchor (&) is used inside itself") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{places.file}: a config is made of sections such as `train:`, not of {_short(raw)}")
    return raw


def _value(node: yaml.Node, path: Path_, places: Places) -> Any:
    if isinstance(node, yaml.MappingNode):
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            here = f"{places.file}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{here}: a key should be a word, not a list or a mapping")
            key = str(key_node.value)
            if key in out:
                first = places.of[(*path, key)]
                raise ConfigError(f"{here}: {'.'.join((*path, key))} is given twice (first in {first})")
            places.of[(*path, key)] = here
            out[key] = _value(value_node, (*path, key), places)
        return out
    if isinstance(node, yaml.SequenceNode):
        return [_value(child, (*path, str(i)), places) for i, child in enumerate(node.value)]
    loader = Loader("")
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, LookupError, AttributeError):  # PyYAML's own for `0x_`, `!!bool maybe`, `!!timestamp soon`
        here = f"{places.file}:{node.start_mark.line + 1}"
        kind = node.tag.rpartition(":")[2]
        raise ConfigError(f"{here}: {'.'.join(path)}: {_short(node.value)} cannot be read as YAML's {kind}") from None
    finally:
        loader.dispose()


def _override(raw: dict[str, Any], override: str, places: Places) -> None:
    key, equals, text = override.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"command line: {override!r} is not of the form section.key=value (data.limit=1000)")
    try:
        node = yaml.compose(text, Loader=Loader)
        value = None if node is None else _value(node, path, Places("command line"))
    except (yaml.YAMLError, RecursionError):
        value = text
    section = raw
    for length, part in enumerate(path[:-1], 1):
        if not isinstance(section.get(part), dict):
            section[part] = {}
            places.replace(path[:length], "command line")
        section = section[part]
    section[path[-1]] = value
    places.replace(path, "command line")


def _complaints(root: type[Section], raw: dict[str, Any], error: ValidationError) -> list[Complaint]:
    """One complaint per key; those of the alternatives of a union become one."""
    found: dict[Path_, list[str]] = {}
    values: dict[Path_, str] = {}
    for one in error.errors(include_url=False):
        path, what = _explain(root, raw, dict(one))
        found.setdefault(path, []).append(what)
        if one["type"] not in ("missing", "extra_forbidden", "unknown_kind") and not isinstance(one["input"], dict):
            values[path] = f" (value {'null' if one['input'] is None else _short(one['input'])})"
    return [(path, ", or ".join(what) + values.get(path, "")) for path, what in found.items()]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _explain(root: type[Section], raw: dict[str, Any], error: dict[str, Any]) -> Complaint:
    """Where, and what is wrong there."""
    path = _written(raw, tuple(str(part) for part in error["loc"]))
    if error["type"] == "extra_forbidden":
        return path, _unknown(root, raw, path)
    if error["type"] == "missing":
        path = tuple(str(part) for part in error["loc"])
        section = _section(root, raw, path[:-1])
        meaning = " ".join((section.model_fields[path[-1]].description or "").split()) if section else ""
        return path, f"is missing{_kind(raw, path, ', but {} needs it')}" + (f": {meaning}" if meaning else "")
    if error["type"] == "unknown_kind":
        return (*path, "kind"), error["msg"]
    message = INSTEAD.get(error["type"]) or error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if error["type"] == "literal_error":
        message += nearest(str(error["input"]), [str(e) for e in error["ctx"]["expected"].split("'")[1::2]])
    return path, f"{message[0].lower()}{message[1:]}"


def _unknown(root: type[Section], raw: dict[str, Any], path: Path_) -> str:
    section = _section(root, raw, path[:-1])
    known = list(section.model_fields) if section else []
    hint = _elsewhere(root, raw, path) or nearest(path[-1], known)
    return f"unknown key{hint} (known{_kind(raw, path, ' for {}') or ' here'}: {', '.join(known)})"


def _written(raw: Any, path: Path_) -> Path_:
    """The part of an error's path that somebody wrote; what follows are pydantic's names for a union's members."""
    for length, part in enumerate(path):
        if isinstance(raw, dict) and part in raw:
            raw = raw[part]
        elif isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            return path[:length]
    return path


def _kind(raw: dict[str, Any], path: Path_, words: str) -> str:
    """`words` with data.kind=files in them, for a key of a section whose kind was chosen."""
    section = raw.get(path[0])
    kind = section.get("kind") if len(path) == 2 and isinstance(section, dict) else None
    return words.format(f"{path[0]}.kind={kind}") if kind else ""


def _section(root: type[Section], raw: Any, path: Path_) -> type[Section] | None:
    section: type[Section] | None = root
    for part in path:
        raw = raw.get(part) if isinstance(raw, dict) else None
        section = _child(section, part, raw) if section and part in section.model_fields else None
    return section


def _child(section: type[Section], name: str, raw: Any) -> type[Section] | None:
    """The section in a field; None for any other field, and where the kind that `raw` names does not exist."""
    field = section.model_fields[name]
    for mark in field.metadata:
        if isinstance(mark, Kind):
            try:
                return mark.config(raw)
            except ConfigError:
                return None
    return _inner(field.annotation)


def _inner(annotation: Any) -> type[Section] | None:
    choices = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return next((c for c in choices if isinstance(c, type) and issubclass(c, Section)), None)


def _elsewhere(root: type[Section], raw: dict[str, Any], path: Path_) -> str:
    """The same key where it is known: in another section, or as a section."""
    *sections_above, key = path
    if sections_above and key in root.model_fields:
        return f" — {key} is a section of its own: indent it less"
    for name, section in sections(root, raw):
        if key in section.model_fields:
            return f" — did you mean {name}.{key}?"
    return ""


def sections(root: type[Section], raw: dict[str, Any]) -> Iterator[tuple[str, type[Section]]]:
    """(name, model) of each section of a root, as the kinds in `raw` choose them."""
    for name in root.model_fields:
        section = _child(root, name, raw.get(name))
        if section is not None:
            yield name, section


def explain(root: Section) -> str:
    """A commented YAML file of sections: every field with its meaning and its value; defaults are commented out."""
    lines: list[str] = []
    for name in type(root).model_fields:
        section: Section = getattr(root, name)
        lines += ["", f"# {(type(section).__doc__ or '').splitlines()[0]}", f"{name}:"]
        for key, field in type(section).model_fields.items():
            lines += [f"  # {text}" for text in (field.description or "").splitlines()]
            mark = "" if key in section.model_fields_set else "#"
            lines.append(f"  {mark}{key}: {_scalar(getattr(section, key))}")
    return "\n".join(lines[1:]) + "\n"


def _scalar(value: Any) -> str:
    if isinstance(value, Path):
        value = str(value.relative_to(Path.cwd()) if value.is_relative_to(Path.cwd()) else value)
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.dump(plain, Dumper=Dumper, default_flow_style=True, allow_unicode=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")
