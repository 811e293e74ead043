"""A training's config from a file, a preset and `--set` assignments, in full or with one clear refusal.

    preset: smollm2
    target: {path: smollm2.gguf}
    data: {files: [answers.jsonl]}

A preset is overruled by the file, the file by assignments such as `optimizer.lr=1e-3`; a file may spell its
settings so too. Files are JSON, or YAML where pyyaml can be imported. Loads without torch.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_type_hints

from dflash.probes.params import read_values
from dflash.training.config import TrainConfig
from dflash.training.presets import PRESETS
from dflash.training.settings import Section, rule_of, section_help, settings_of
from dflash.values import require_choice, typed

PRESET = "preset"
SECTIONS: Mapping[str, type[Section]] = get_type_hints(TrainConfig)
Loose = dict[str, dict[str, object]]


def load_config(file: Path | None, assignments: Sequence[str] = ()) -> TrainConfig:
    """Return the config that a file and `SECTION.SETTING=VALUE` assignments describe.

    Raises:
        ValueError: a file cannot be read, or a setting is unknown, given twice, missing, of another type, out
            of range or at odds with another one; one line that names it by its path.
    """
    told, assigned = _read(file), read_values(None, assignments)
    preset = assigned.pop(PRESET, told.pop(PRESET, None))
    return parse_config(_merged(_preset(preset), _sections(told), _sections(assigned)))


def parse_config(values: Mapping[str, object]) -> TrainConfig:
    """Return the config of nested values such as `render` writes, `preset` not among them.

    Raises:
        ValueError: as `load_config`.
    """
    loose = _sections(values)
    return TrainConfig(**{name: _section(cls, loose.get(name, {})) for name, cls in SECTIONS.items()})  # type: ignore[arg-type]


def render(config: TrainConfig) -> str:
    """Return every setting as JSON that loads back to the same config."""
    return json.dumps(dataclasses.asdict(config), indent=2, ensure_ascii=False) + "\n"


def differences(before: TrainConfig, now: TrainConfig) -> list[str]:
    """Return a line for each setting in which a continued training may not differ, but does."""
    return [
        f"{cls.section}.{field.name} was {_json(old)}, is {_json(new)}"
        for name, cls in SECTIONS.items()
        for field in settings_of(cls)
        if not rule_of(field).may_change
        and (old := getattr(getattr(before, name), field.name))
        != (new := getattr(getattr(now, name), field.name))
    ]


def help_text() -> str:
    """Return every setting with type, default, range and meaning."""
    parts = [
        f"preset: one of {', '.join(PRESETS)}\n    A config to start from; it is said in full when it runs."
    ]
    parts += [f"# {(cls.__doc__ or '').strip()}\n{section_help(cls)}" for cls in SECTIONS.values()]
    return "\n\n".join(parts) + "\n"


def _read(file: Path | None) -> dict[str, object]:
    if file is not None and file.suffix in {".yaml", ".yml"}:
        from dflash.training.yaml_values import read_yaml  # noqa: PLC0415  pyyaml need not be there

        return read_yaml(file)
    return read_values(file, [])


def _preset(name: object) -> Loose:
    if name is None:
        return {}
    require_choice(PRESET, str(name), PRESETS)
    return {section: dict(settings) for section, settings in PRESETS[str(name)].items()}


def _sections(values: Mapping[str, object]) -> Loose:
    """Return the values by section if their names are known; what they mean is checked later."""
    sections: Loose = {}
    for name, value in values.items():
        section, _, setting = str(name).partition(".")
        if section not in SECTIONS:
            raise ValueError(_unknown(str(name)))
        for known, told in _settings(section, {setting: value} if setting else value).items():
            if known in sections.setdefault(section, {}):
                raise ValueError(f"{section}.{known} is given twice")
            sections[section][known] = told
    return sections


def _settings(section: str, values: object) -> Mapping[str, object]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{section} is {_json(values)}; it must hold settings")  # noqa: TRY004  a user's mistake
    known = [field.name for field in settings_of(SECTIONS[section])]
    for setting in values:
        if setting not in known:
            raise ValueError(_unknown(f"{section}.{setting}"))
    return values


def _merged(*layers: Loose) -> Loose:
    return {
        name: {setting: value for layer in layers for setting, value in layer.get(name, {}).items()}
        for name in SECTIONS
    }


def _unknown(path: str) -> str:
    """Return the refusal of a path with the nearest known one, first by the setting's name alone."""
    paths = [f"{name}.{field.name}" for name, cls in SECTIONS.items() for field in settings_of(cls)]
    section, _, setting = path.rpartition(".")
    own = [known for known in paths if known.startswith(f"{section}.")]
    by_name = {known.partition(".")[2]: known for known in (*paths, *own)}
    names = [by_name[near] for near in difflib.get_close_matches(setting, by_name, n=1)]
    near = names if own or not section else difflib.get_close_matches(path, paths, n=1)
    near = near or ([] if own else difflib.get_close_matches(path, [*SECTIONS, PRESET], n=1))
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(own or [PRESET, *SECTIONS])}"
    return f"unknown setting {path!r}; {hint}"


def _section(cls: type[Section], values: Mapping[str, object]) -> Section:
    hints = get_type_hints(cls)
    for field in settings_of(cls):
        if field.default is dataclasses.MISSING and field.name not in values:
            meaning = rule_of(field).meaning
            raise ValueError(f"{cls.section}.{field.name} is missing; it must be given: {meaning}")
    return cls(**{name: typed(f"{cls.section}.{name}", value, hints[name]) for name, value in values.items()})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
