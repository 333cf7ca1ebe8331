"""From one YAML file and overrides to a validated, frozen model; every complaint names file, line and remedy."""

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

from lockstep.base.errors import ConfigError, nearest
from lockstep.base.yaml_text import COMMAND_LINE, Path_, Places, YamlDumper, read, read_file, scalar_or_text, short

MANY = 10**9
"""The upper end of counts and times: steps, samples, seconds. What is larger is a slip of the keyboard."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Of numbers with a fraction: float32 holds no more than 1.2e-38 to 3.4e38, and their products have to fit, too."""


class Section(BaseModel):
    """A part's own settings: frozen, no unknown keys; a field's meaning is the string under it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
    incidental: ClassVar[frozenset[str]] = frozenset()
    """Fields that can never change a bit of the weights (where files lie, how often to log)."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _is_sane_number(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """Python counts True as 1: `global_batch: yes` would train on single samples. A number that no float32 holds
        would count as 0 or infinite, where its digits say otherwise."""
        found = validate(value)
        if isinstance(found, bool) or not isinstance(found, int | float):
            return found
        if isinstance(value, bool):
            raise ValueError("should be a number")
        if isinstance(found, float) and found and not SMALLEST <= abs(found) <= LARGEST:
            raise ValueError(f"should be between {SMALLEST:g} and {LARGEST:g}, where it is not 0")
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


INSTEAD = {
    "dict_type": "should be keys with values, such as {a: 1}",
    "model_type": "should be a section with keys of its own",
    "path_type": "should be the path of a file or folder",
    "string_type": "should be text: put it in quotes, and once more in quotes on a command line ('\"...\"')",
    "tuple_type": "should be a list, such as [a, b]",
}
"""What pydantic says in words of Python -> the same in words of YAML."""
Complaint = tuple[Path_, str]
"""Where in the config (section, key) and what is wrong there."""


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
    text = read_file(path)
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
    return yaml.dump(section.model_dump(mode="json"), Dumper=YamlDumper, sort_keys=False, allow_unicode=True)


def _read(text: str, places: Places) -> dict[str, Any]:
    raw = read(text, places)
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{places.file}: a config is made of sections such as `train:`, not of {short(raw)}")
    return raw


def _override(raw: dict[str, Any], override: str, places: Places) -> None:
    key, equals, text = override.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"{COMMAND_LINE}: {override!r} is not of the form section.key=value (data.limit=1000)")
    value = scalar_or_text(text, path)
    section = raw
    for length, part in enumerate(path[:-1], 1):
        if not isinstance(section.get(part), dict):
            section[part] = {}
            places.replace(path[:length], COMMAND_LINE)
        section = section[part]
    section[path[-1]] = value
    places.replace(path, COMMAND_LINE)


def _complaints(root: type[Section], raw: dict[str, Any], error: ValidationError) -> list[Complaint]:
    """One complaint per key; those of the alternatives of a union become one."""
    found: dict[Path_, list[str]] = {}
    values: dict[Path_, str] = {}
    for one in error.errors(include_url=False):
        path, what = _explain(root, raw, dict(one))
        found.setdefault(path, []).append(what)
        if one["type"] not in ("missing", "extra_forbidden", "unknown_kind") and not isinstance(one["input"], dict):
            values[path] = f" (value {'null' if one['input'] is None else short(one['input'])})"
    return [(path, ", or ".join(what) + values.get(path, "")) for path, what in found.items()]


def _explain(root: type[Section], raw: dict[str, Any], error: dict[str, Any]) -> Complaint:
    """Where, and what is wrong there."""
    path = _written(raw, tuple(str(part) for part in error["loc"]))
    if error["type"] == "extra_forbidden":
        return path, _unknown(root, raw, path)
    if error["type"] == "missing":
        path = tuple(str(part) for part in error["loc"])
        return path, f"is missing{_kind(raw, path, ', but {} needs it')}{_meaning(root, raw, path)}"
    if error["type"] == "string_pattern_mismatch":
        return path, f"is not written as it should be{_meaning(root, raw, path)}"
    if error["type"] == "unknown_kind":
        return (*path, "kind"), error["msg"]
    message = INSTEAD.get(error["type"]) or error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if error["type"] == "literal_error":
        message += nearest(str(error["input"]), [str(e) for e in error["ctx"]["expected"].split("'")[1::2]])
    return path, f"{message[0].lower()}{message[1:]}"


def _meaning(root: type[Section], raw: dict[str, Any], path: Path_) -> str:
    """What the setting is, as its section says it; that of the whole list for one of its entries."""
    section = _section(root, raw, path[:-1])
    if section is None or path[-1] not in section.model_fields:
        return _meaning(root, raw, path[:-1]) if path[-1].isdigit() else ""
    meaning = " ".join((section.model_fields[path[-1]].description or "").split())
    return f": {meaning}" if meaning else ""


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
    text = yaml.dump(plain, Dumper=YamlDumper, default_flow_style=True, allow_unicode=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")
