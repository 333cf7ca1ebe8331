"""From one YAML file and overrides to a validated, frozen model; every complaint names file, line and remedy."""

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lockstep.errors import ConfigError, nearest


class Section(BaseModel):
    """A part's own settings: frozen, no unknown keys; a field's meaning is the string under it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
    incidental: ClassVar[frozenset[str]] = frozenset()
    """Fields that can never change a bit of the weights (where files lie, how often to log)."""


class PluginSection(Section):
    """The settings of one plugin; `kind` is its file's name."""

    kind: str
    """Which one: the name of a file in its folder."""


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
        return self.find(str(named))

    def validate(self, value: Any) -> PluginSection:
        """Turn a raw mapping into the plugin's Config."""
        if isinstance(value, PluginSection):
            return value
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise PydanticCustomError("section_type", "should be a section with keys of its own")
        try:
            config = self.config(value)
        except ConfigError as error:
            raise PydanticCustomError("unknown_kind", "{reason}", {"reason": str(error)}) from None
        return config.model_validate({"kind": self.default, **value})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate by the plugin's own model, and dump by it too."""
        dump = core_schema.plain_serializer_function_ser_schema(lambda section: section.model_dump(mode="json"))
        return core_schema.no_info_plain_validator_function(self.validate, serialization=dump)


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
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
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
    try:
        found = root.model_validate(raw)
    except ValidationError as error:
        complaints = [_explain(root, raw, dict(e)) for e in error.errors(include_url=False)]
    else:
        complaints = check(found)
        if not complaints:
            return found
    raise ConfigError("\n".join(f"{places.find(p)}: {'.'.join(p)}: {what}" for p, what in complaints))


def dump(section: Section) -> str:
    """YAML text that `load` reads back to an equal section."""
    return yaml.safe_dump(section.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(text: str, places: Places) -> dict[str, Any]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        raw = {} if node is None else _value(node, (), places)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{places.file}{line}: this is not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{places.file}: this is not YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{places.file}: a config is made of sections such as `train:`, not of {raw!r}")
    return {name: section for name, section in raw.items() if section is not None}


def _value(node: yaml.Node, path: Path_, places: Places) -> Any:
    if isinstance(node, yaml.MappingNode):
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here = f"{places.file}:{key_node.start_mark.line + 1}"
            if key in out:
                first = places.of[(*path, key)]
                raise ConfigError(f"{here}: {'.'.join((*path, key))} is given twice (first in {first})")
            places.of[(*path, key)] = here
            out[key] = _value(value_node, (*path, key), places)
        return out
    if isinstance(node, yaml.SequenceNode):
        return [_value(child, (*path, str(i)), places) for i, child in enumerate(node.value)]
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def _override(raw: dict[str, Any], override: str, places: Places) -> None:
    key, equals, text = override.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"command line: {override!r} is not of the form section.key=value (data.limit=1000)")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    section = raw
    for part in path[:-1]:
        if not isinstance(section.get(part), dict):
            section[part] = {}
        section = section[part]
    section[path[-1]] = value
    for length in range(1, len(path)):
        places.of.setdefault(path[:length], "command line")
    places.of[path] = "command line"


def _explain(root: type[Section], raw: dict[str, Any], error: dict[str, Any]) -> Complaint:
    path = tuple(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _known(root, raw, path[:-1])
        near = nearest(path[-1], known)
        elsewhere = "" if near else _elsewhere(root, raw, path[-1])
        return (
            path,
            f"unknown key (value {error['input']!r}){near or elsewhere} (known here: {', '.join(known)})",
        )
    if error["type"] == "missing":
        return path, "is missing and has no default"
    if error["type"] == "unknown_kind":
        return (*path, "kind"), error["msg"]
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error":
        message += nearest(str(error["input"]), [str(e) for e in error["ctx"]["expected"].split("'")[1::2]])
    return path, f"{message[0].lower()}{message[1:]} (value {error['input']!r})"


def _known(root: type[Section], raw: Any, path: Path_) -> list[str]:
    section: type[Section] | None = root
    for part in path:
        section = section and _child(section, part, raw.get(part) if isinstance(raw, dict) else None)
        raw = raw.get(part, {}) if isinstance(raw, dict) else {}
    return list(section.model_fields) if section else []


def _child(section: type[Section], name: str, raw: Any) -> type[Section] | None:
    field = section.model_fields[name]
    for mark in field.metadata:
        if isinstance(mark, Kind):
            return mark.config(raw)
    return _inner(field.annotation)


def _inner(annotation: Any) -> type[Section] | None:
    choices = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return next((c for c in choices if isinstance(c, type) and issubclass(c, Section)), None)


def _elsewhere(root: type[Section], raw: dict[str, Any], key: str) -> str:
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
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
