"""Load a YAML file with overrides into a frozen, validated model; messages name file, line and the repair."""

import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lockstep.base import remote_path
from lockstep.base.errors import ConfigError, nearest
from lockstep.base.yaml_text import (
    COMMAND_LINE,
    KeyLocations,
    KeyPath,
    YamlDumper,
    read,
    read_file,
    scalar_or_text,
    short,
)

MANY = 10**9
"""The upper limit of counts and times: steps, samples, seconds. Larger values are typing errors."""
ELSEWHERE = {
    "batch_size": "train.global_batch, the samples of a step on all processes together, or train.micro_batch",
    "learning_rate": "optim.lr",
    "num_epochs": "train.epochs",
    "max_steps": "train.steps",
    "gradient_clipping": "optim.clip",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "num_workers": "data.workers",
    "output_dir": "run.dir",
}
"""Name of a setting in other trainers -> its name here."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Limits of float settings: float32 ranges from 1.2e-38 to 3.4e38, and products have to fit, too."""


class Section(BaseModel):
    """Base class of settings: frozen, without unknown keys; the docstring under a field is its help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
    incidental: ClassVar[frozenset[str]] = frozenset()
    """Fields that never change a bit of the weights (paths, how often to log)."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _check_number(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """Reject a boolean given for a number, since `global_batch: yes` would be 1, and floats that float32 would turn
        into 0 or infinity."""
        number = validate(value)
        if isinstance(number, bool) or not isinstance(number, int | float):
            return number
        if isinstance(value, bool):
            raise ValueError("should be a number")
        if isinstance(number, float) and number and not SMALLEST <= abs(number) <= LARGEST:
            raise ValueError(f"should be between {SMALLEST:g} and {LARGEST:g}, where it is not 0")
        return number

    def numeric_settings(self) -> dict[str, Any]:
        """Return the fields that may change a bit of the weights, as in YAML."""
        return self.model_dump(mode="json", exclude=set(self.incidental))


class PluginSection(Section):
    """The settings of a plugin; `kind` is the name of its file."""

    kind: str
    """Name of the kind; `lockstep plugins` lists them."""


Root = TypeVar("Root", bound=Section)

LocalPath = Annotated[Path, AfterValidator(remote_path.local)]
"""A path on this machine; made absolute from the working folder."""


@dataclass(frozen=True)
class Kind:
    """Annotation of a section whose model is the `Config` of the plugin that its `kind` names."""

    default: str
    find: Callable[[str], type[PluginSection]]
    """Name -> Config; raises ConfigError for an unknown name."""
    names: Callable[[], list[str]]

    def config(self, value: Any) -> type[PluginSection]:
        """Return the Config class for a section's raw value. Raises ConfigError for an unknown kind."""
        kind = value.get("kind", self.default) if isinstance(value, dict) else self.default
        return self.find("" if kind is None else str(kind))

    def validate(self, value: Any) -> PluginSection:
        """Validate a raw mapping by the plugin's Config."""
        if isinstance(value, PluginSection):
            return value
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise PydanticCustomError("section_type", "{reason}", {"reason": MESSAGES["model_type"]})
        try:
            config = self.config(value)
        except ConfigError as error:
            raise PydanticCustomError("unknown_kind", "{reason}", {"reason": str(error)}) from None
        return config.model_validate({"kind": self.default, **value})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate by the plugin's own model, and dump by it too."""
        dump = core_schema.plain_serializer_function_ser_schema(lambda section: section.model_dump(mode="json"))
        return core_schema.no_info_plain_validator_function(self.validate, serialization=dump)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe a section only as an object: its keys depend on its kind."""
        return {"type": "object"}


MESSAGES = {
    "dict_type": "should be keys with values, such as {a: 1}",
    "model_type": "should be a section with keys of its own",
    "path_type": "should be the path of a file or folder",
    "string_type": "should be text: put it in quotes, and once more in quotes on a command line ('\"...\"')",
    "tuple_type": "should be a list, such as [a, b]",
}
"""Type of a pydantic error -> message in terms of YAML instead of Python."""
Complaint = tuple[KeyPath, str]
"""A key (section, key) and what is wrong with it."""


def load(
    root: type[Root],
    path: Path,
    overrides: Sequence[str] = (),
    *,
    check: Callable[[Root], list[Complaint]] = lambda _: [],
) -> Root:
    """Read a YAML file, apply `section.key=value` overrides and validate; `check` finds invalid combinations.

    Raises ConfigError with a line per mistake: file and line, key, value, and the nearest valid name.
    """
    return parse(root, read_file(path), file=str(path), overrides=overrides, check=check)


def parse(
    root: type[Root],
    text: str,
    *,
    file: str,
    overrides: Sequence[str] = (),
    check: Callable[[Root], list[Complaint]] = lambda _: [],
) -> Root:
    """Parse YAML in memory as `load` does; `file` names it in messages."""
    locations = KeyLocations(file)
    raw = read(text, locations)
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: a config is made of sections such as `train:`, not of {short(raw)}")
    for override in overrides:
        _override(raw, override, locations)
    raw = {name: section for name, section in raw.items() if section is not None}
    try:
        config = root.model_validate(raw)
    except ValidationError as error:
        complaints = _complaints(root, raw, error)
    else:
        complaints = check(config)
        if not complaints:
            return config
    lines = [f"{locations.find(p)}: {'.'.join(p)}: {what}" for p, what in complaints]
    raise ConfigError("\n".join(line.replace("\n", "\\n") for line in lines))


def dump(section: Section) -> str:
    """Write a section as YAML that `load` reads back to an equal one."""
    return yaml.dump(section.model_dump(mode="json"), Dumper=YamlDumper, sort_keys=False, allow_unicode=True)


def _override(raw: dict[str, Any], override: str, locations: KeyLocations) -> None:
    key, equals, text = override.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"{COMMAND_LINE}: {override!r} is not of the form section.key=value (data.limit=1000)")
    value = scalar_or_text(text, path)
    section = raw
    for length, part in enumerate(path[:-1], 1):
        if not isinstance(section.get(part), dict):
            section[part] = {}
            locations.replace(path[:length], COMMAND_LINE)
        section = section[part]
    section[path[-1]] = value
    locations.replace(path, COMMAND_LINE)


def _complaints(root: type[Section], raw: dict[str, Any], error: ValidationError) -> list[Complaint]:
    """Return one complaint per key; those of the members of a union are joined."""
    messages: dict[KeyPath, list[str]] = {}
    values: dict[KeyPath, str] = {}
    for each in error.errors(include_url=False):
        path, message = _explain(root, raw, dict(each))
        messages.setdefault(path, []).append(message)
        if each["type"] not in ("missing", "extra_forbidden", "unknown_kind") and not isinstance(each["input"], dict):
            values[path] = f" (value {'null' if each['input'] is None else short(each['input'])})"
    return [(path, ", or ".join(some) + values.get(path, "")) for path, some in messages.items()]


def _explain(root: type[Section], raw: dict[str, Any], error: dict[str, Any]) -> Complaint:
    path = _user_path(raw, tuple(str(part) for part in error["loc"]))
    if error["type"] == "extra_forbidden":
        return path, _unknown(root, raw, path)
    if error["type"] == "missing":
        path = tuple(str(part) for part in error["loc"])
        return path, f"is missing{_kind(raw, path, ', but {} needs it')}{_meaning(root, raw, path)}"
    if error["type"] == "string_pattern_mismatch":
        return path, f"is not written as it should be{_meaning(root, raw, path)}"
    if error["type"] == "unknown_kind":
        return (*path, "kind"), error["msg"]
    message = MESSAGES.get(error["type"]) or error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if error["type"] == "literal_error":
        message += nearest(str(error["input"]), [str(e) for e in error["ctx"]["expected"].split("'")[1::2]])
    return path, f"{message[0].lower()}{message[1:]}"


def _meaning(root: type[Section], raw: dict[str, Any], path: KeyPath) -> str:
    """Return the help of a setting; for an entry of a list, that of the list."""
    section = _section(root, raw, path[:-1])
    if section is None or path[-1] not in section.model_fields:
        return _meaning(root, raw, path[:-1]) if path[-1].isdigit() else ""
    meaning = " ".join((section.model_fields[path[-1]].description or "").split())
    return f": {meaning}" if meaning else ""


def _unknown(root: type[Section], raw: dict[str, Any], path: KeyPath) -> str:
    section = _section(root, raw, path[:-1])
    known = list(section.model_fields) if section else []
    hint = _hint(root, raw, path) or nearest(path[-1], known)
    return f"unknown key{hint} (known{_kind(raw, path, ' for {}') or ' here'}: {', '.join(known)})"


def _user_path(raw: Any, path: KeyPath) -> KeyPath:
    """Return the part of an error's path that the user gave; pydantic appends names of a union's members."""
    for length, part in enumerate(path):
        if isinstance(raw, dict) and part in raw:
            raw = raw[part]
        elif isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            return path[:length]
    return path


def _kind(raw: dict[str, Any], path: KeyPath, words: str) -> str:
    """Format `words` with data.kind=files for a key of a section whose kind is given; else return ""."""
    section = raw.get(path[0])
    kind = section.get("kind") if len(path) == 2 and isinstance(section, dict) else None
    return words.format(f"{path[0]}.kind={kind}") if kind else ""


def _section(root: type[Section], raw: Any, path: KeyPath) -> type[Section] | None:
    section: type[Section] | None = root
    entries: list[Any] = []
    for part in path:
        if isinstance(raw, list):
            raw = raw[int(part)] if part.isdigit() and int(part) < len(raw) else None
            section = _of_kind(entries, raw)
            continue
        raw = raw.get(part) if isinstance(raw, dict) else None
        field = section.model_fields.get(part) if section else None
        entries = [each for entry in get_args(field.annotation) for each in get_args(entry)[1:]] if field else []
        section = _child(section, part, raw) if section and field else None
    return section


def _of_kind(metadata: Sequence[Any], raw: Any) -> type[Section] | None:
    """Return the section class of a Kind in an annotation; None without one, and for an unknown kind."""
    with suppress(ConfigError):
        return next((each.config(raw) for each in metadata if isinstance(each, Kind)), None)
    return None


def _child(section: type[Section], name: str, raw: Any) -> type[Section] | None:
    """Return the section class of a field; None for other fields, and where `raw` gives an unknown kind."""
    field = section.model_fields[name]
    if any(isinstance(each, Kind) for each in field.metadata):
        return _of_kind(field.metadata, raw)
    is_union = get_origin(field.annotation) in (Union, types.UnionType)
    choices = get_args(field.annotation) if is_union else (field.annotation,)
    return next((c for c in choices if isinstance(c, type) and issubclass(c, Section)), None)


def _hint(root: type[Section], raw: dict[str, Any], path: KeyPath) -> str:
    """Suggest the right place for a known key given in the wrong section."""
    *sections_above, key = path
    if sections_above and key in root.model_fields:
        return f" — {key} is a section of its own: indent it less"
    if key in ELSEWHERE:
        return f" — did you mean {ELSEWHERE[key]}?"
    for name in root.model_fields:
        section = _child(root, name, raw.get(name))
        if section is not None and key in section.model_fields:
            return f" — did you mean {name}.{key}?"
    return ""


def explain(root: Section) -> str:
    """Write sections as YAML with every field, its help and value; defaults are commented out."""
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
    if isinstance(plain, list):
        plain = [e.model_dump(mode="json", exclude_unset=True) if isinstance(e, Section) else e for e in plain]
    text = yaml.dump(plain, Dumper=YamlDumper, default_flow_style=True, allow_unicode=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")
