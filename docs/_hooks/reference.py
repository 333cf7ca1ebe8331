"""MkDocs hook: fills the pages of docs/reference/ from the code, where they say `<!-- generated: NAME -->`.

Each section of a config has a page of its own, docs/reference/configuration/SECTION.md, which exists on the site only.
"""

import html
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import lockstep
from lockstep.base import plugins
from lockstep.base.config import Kind, PluginSection, Section
from lockstep.cli._app import contexts
from lockstep.recipe.recipe import Recipe, kind_of

SPECIAL = re.compile(r"([\\*_\[\]#])")
CONFIGURATION = "reference/configuration.md"
MARK = re.compile(r"<!-- generated: (\w+) -->")
LISTED = {"observe": ("sinks", "observe.sinks"), "export": ("kind", "inference.export.formats")}
"""Section -> a setting that names plugins without settings of their own, and their family."""
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "exclusiveMaximum": "below", "maximum": "at most"}
"""Key of JSON schema -> words, in the order in which they are said."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of the sections below the configuration reference."""
    _list_sections(config.nav)
    return config


def _list_sections(entries: Any) -> None:
    for place, entry in enumerate(entries):
        if entry == CONFIGURATION:
            entries[place] = {"Configuration": [CONFIGURATION, *map(section_page, Recipe.model_fields)]}
        elif isinstance(entry, dict):
            for below in entry.values():
                if isinstance(below, list):
                    _list_sections(below)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each section of a config."""
    for name in Recipe.model_fields:
        files.append(File.generated(config, section_page(name), content="\n".join(section(name))))
    return files


def section_page(name: str) -> str:
    """Return the path of a section's page below docs/."""
    return f"{CONFIGURATION.removesuffix('.md')}/{name}.md"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each mark of a page by what is generated for it."""
    return MARK.sub(lambda mark: "\n".join(GENERATORS[mark[1]]()), markdown)


def configuration() -> Iterator[str]:
    """Yield a table of the sections."""
    yield "| section | what it is about |\n|---|---|"
    for name in Recipe.model_fields:
        yield f"| [{name}](configuration/{name}.md) | {escaped(first_paragraph(_section(name)))} |"


def section(name: str) -> Iterator[str]:
    """Yield a section's page: its settings, and for a family of plugins those of each kind."""
    yield f"# {name}\n\n{escaped(first_paragraph(_section(name)))}\n"
    kind = kind_of(name)
    if kind:
        yield from _plugin_section(name, kind)
    else:
        yield from _settings(name, _section(name), list(_section(name).model_fields))
    if name in LISTED:
        yield from _listed(*LISTED[name], section=name)


def _section(name: str) -> type[Section]:
    """Its class; of a family of plugins, the one that all kinds inherit from."""
    kind, section = kind_of(name), Recipe.model_fields[name].annotation
    if kind:
        return shared_base([kind.find(each) for each in kind.names()])
    assert isinstance(section, type) and issubclass(section, Section), name
    return section


def _plugin_section(name: str, plugin: Kind) -> Iterator[str]:
    kinds = {kind: plugin.find(kind) for kind in plugin.names()}
    base = _section(name)
    common = [key for key in base.model_fields if key != "kind"]
    links = ", ".join(f"[`{kind}`](#{name}-{kind})" for kind in kinds)
    yield setting(f"{name}.kind", f"one of {links}. Default: `{plugin.default}`.")
    yield from _settings(name, base, common)
    for kind, config in kinds.items():
        yield f"\n## {name}.kind: {kind} {{ #{name}-{kind} }}\n"
        yield escaped(first_paragraph(config)) + "\n"
        described = base.model_json_schema()["properties"]
        own = config.model_json_schema()["properties"]
        keys = [key for key in own if key != "kind" and own[key] != described.get(key)]
        yield from _settings(name, config, keys, anchors=f"{name}-{kind}")
        if not keys:
            yield f"No settings besides those {'above' if common else 'of its name'}.\n"


def shared_base(configs: list[type[PluginSection]]) -> type[PluginSection]:
    """The nearest class that all of them inherit from."""
    return next(each for each in configs[0].__mro__[1:] if all(issubclass(config, each) for config in configs))


def _settings(name: str, section: type[Section], keys: list[str], *, anchors: str = "") -> Iterator[str]:
    schema = section.model_json_schema()
    anchors = anchors or name
    if len(keys) > 1:
        yield " · ".join(f"[`{key}`](#{anchors}-{key})" for key in keys) + "\n"
    for key in keys:
        about, field = schema["properties"][key], section.model_fields[key]
        default = "" if key in schema.get("required", []) else shown_default(field, about.get("default"))
        meaning = escaped(" ".join((field.description or "").split()))
        kind = described_type(about)
        if LISTED.get(name, ("",))[0] == key:
            kind = f"{'list of' if about['type'] == 'array' else 'one of'} the [names below](#{name}-{key}-names)"
        facts = f"{kind}. Default: {default}." if default else f"{kind}. **Required.**"
        yield setting(f"{name}.{key}", facts, meaning=meaning, anchor=f"{anchors}-{key}")


def setting(name: str, facts: str, *, meaning: str = "", anchor: str = "") -> str:
    """One entry of a definition list, which has its own anchor."""
    anchor = anchor or name.replace(".", "-")
    return f"[`{name}`](#{anchor}){{ #{anchor} .setting }}\n\n:   {meaning}\n\n    :material-tune: {facts}\n"


def shown_default(field: Any, default: Any) -> str:
    """In YAML; a path below the home folder of whoever builds the site is written with `~`."""
    if isinstance(field.default, Path) and field.default.is_relative_to(Path.home()):
        default = f"~/{field.default.relative_to(Path.home())}"
    if default is None:
        return "empty (`null`)"
    text = yaml.safe_dump(default, default_flow_style=True, allow_unicode=True, width=1000)
    return f"`{text.removesuffix(chr(10)).removesuffix(chr(10) + '...')}`"


def described_type(about: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "anyOf" in about:
        return ", or ".join(described_type(each) for each in about["anyOf"])
    if "enum" in about or "const" in about:
        values = about.get("enum", [about.get("const")])
        return ("one of " if len(values) > 1 else "") + ", ".join(f"`{value}`" for value in values)
    if about.get("format") == "path":
        return "path"
    of = about.get("type", "object")
    if of == "array":
        parts = about.get("prefixItems", [])
        return f"list{f' of {len(parts)}' if parts else ''} (each: {described_type([*parts, about.get('items')][0])})"
    kind = {"null": "empty", "string": "text", "boolean": "`true` or `false`", "object": "keys with values"}
    bounds = " and ".join(f"{words} {number(about[key])}" for key, words in BOUNDS.items() if key in about)
    if {"minimum", "maximum"} <= about.keys():
        bounds = f"from {number(about['minimum'])} to {number(about['maximum'])}"
    return f"{kind.get(of, of)} {bounds}".strip()


def number(value: float) -> str:
    """A limit, as a power where it is one."""
    for base in (10, 2):
        exponent = len(str(int(value))) - 1 if base == 10 else int(value).bit_length() - 1
        if value >= 10**6 and value == base**exponent:
            return f"{base}{str(exponent).translate(SUPERSCRIPTS)}"
    return f"{value:,}"


def _listed(key: str, family: str, *, section: str) -> Iterator[str]:
    yield f"\n## {section}.{key}: the names {{ #{section}-{key}-names }}\n"
    for name in plugins.names(family):
        module = inspect.getdoc(plugins.find(family, name)) or ""
        yield f"`{name}`\n\n:   {escaped(' '.join(module.split(chr(10) * 2)[0].split()))}\n"


def commands() -> Iterator[str]:
    """Every command with its usage, arguments and options, as its --help says."""
    for name, context in contexts():
        command: Any = context.command
        yield f"\n## lockstep {name} {{ #{name} }}\n"
        yield f"```\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
        yield escaped(inspect.cleandoc(command.help or "")) + "\n"
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if record is not None:
                yield f"`{record[0]}`\n\n:   {escaped(record[1])}\n"


def python() -> Iterator[str]:
    """Directives of mkdocstrings for all that `import lockstep` offers."""
    first = [*lockstep.API, *lockstep.LOADED]
    functions_first = sorted(first, key=lambda name: name[0].isupper())
    names = functions_first + [name for name in lockstep.__all__ if name not in (*first, "__version__")]
    yield "\n".join(f"::: lockstep.{name}\n" for name in names)


def first_paragraph(described: type) -> str:
    """Of a docstring, on one line."""
    return " ".join((inspect.getdoc(described) or "").split("\n\n")[0].split())


def escaped(text: str) -> str:
    """Plain text as Markdown that shows the same; what is in backquotes stays code."""
    texts_and_codes = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else SPECIAL.sub(r"\\\1", html.escape(part, quote=False))
        for part in texts_and_codes
    )


GENERATORS = {"configuration": configuration, "commands": commands, "python": python}
"""Name in a mark -> what writes its lines."""
