"""A setting: a dataclass field that says what it means, what it may be, and whether a resume may change it.

Knows how fields are declared and checked. Which settings there are is `dflash.training.config`'s business.
Loads without torch.
"""

import dataclasses
import json
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, get_type_hints

from dflash.values import spelled, unknown


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What a setting means and may be; bounds and choices hold for each item of a list.

    `may_change` says that a training may be continued with another value.
    """

    meaning: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: Collection[str] = ()
    is_filled: bool = False
    may_change: bool = False

    def refusal(self, name: str, value: object) -> str | None:
        """Return why the value is refused, None where it is not."""
        if self.is_filled and not value:
            return f"{name} is empty; name at least one"
        for item in value if isinstance(value, tuple) else (value,):
            if item is None or (self.choices and item in self.choices):
                continue
            if self.choices:
                return unknown(name, str(item), self.choices)
            if self._is_outside(item):
                return f"{name} is {item}; it must be {self.range_text()}"
        return None

    def range_text(self) -> str:
        """Return the bounds in words, nothing where there are none."""
        bounds = {
            "at least": self.least,
            "greater than": self.above,
            "at most": self.most,
            "less than": self.below,
        }
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)

    def _is_outside(self, item: Any) -> bool:
        return (
            (self.least is not None and not item >= self.least)
            or (self.above is not None and not item > self.above)
            or (self.most is not None and not item <= self.most)
            or (self.below is not None and not item < self.below)
        )


def setting(meaning: str, default: Any = dataclasses.MISSING, **rule: Any) -> Any:
    """Return a dataclass field with a `Rule`; without a default it must be given."""
    metadata = {"rule": Rule(meaning=meaning, **rule)}
    return dataclasses.field(default=default, metadata=metadata)


def rule_of(field: "dataclasses.Field[Any]") -> Rule:
    """Return the rule that the field was declared with."""
    rule: Rule = field.metadata["rule"]
    return rule


class Section:
    """A group of settings, checked when it is made.

    Raises:
        ValueError: a value is out of range; the message has the setting's path.
    """

    __slots__ = ()
    section: ClassVar[str]

    def __post_init__(self) -> None:
        for field in settings_of(type(self)):
            path = f"{self.section}.{field.name}"
            refusal = rule_of(field).refusal(path, getattr(self, field.name))
            if refusal is not None:
                raise ValueError(refusal)


def settings_of(cls: type[Section]) -> Sequence["dataclasses.Field[Any]"]:
    """Return the settings of a section in their order."""
    assert dataclasses.is_dataclass(cls)
    return dataclasses.fields(cls)


def section_help(cls: type[Section]) -> str:
    """Return every setting of a section with type, default, bounds and meaning, two lines each."""
    hints = get_type_hints(cls)
    return "\n".join(
        _setting_help(f"{cls.section}.{field.name}", field, spelled(hints[field.name]))
        for field in settings_of(cls)
    )


def _setting_help(path: str, field: "dataclasses.Field[Any]", kind: str) -> str:
    rule = rule_of(field)
    is_required = field.default is dataclasses.MISSING
    default = "required" if is_required else f"default {json.dumps(field.default)}"
    facts = [kind, rule.range_text(), " | ".join(rule.choices), default]
    changes = " May change when a training is continued." if rule.may_change else ""
    return f"{path}: {', '.join(fact for fact in facts if fact)}\n    {rule.meaning}{changes}"
