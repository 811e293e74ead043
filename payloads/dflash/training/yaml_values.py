"""A YAML file as plain values, where pyyaml is there: a GPU host may have none, and JSON always goes.

Knows how YAML is read: duplicate keys, which pyyaml takes, are refused, and `6e-4`, which pyyaml takes for
text, is a number as in YAML 1.2.
"""

import re
from pathlib import Path
from typing import Any

FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


def read_yaml(path: Path) -> dict[str, object]:
    """Return the file's values.

    Raises:
        ValueError: pyyaml or the file is not there, or it is no YAML mapping; with the line if there is one.
    """
    try:
        import yaml  # noqa: PLC0415  it need not be there
    except ImportError:
        raise ValueError(
            f"{path}: pyyaml is not installed here; write the same as JSON, in a .json file"
        ) from None
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_strict_loader(yaml))  # noqa: S506  a safe one
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: {error.problem}") from None
    except RecursionError:
        raise ValueError(f"{path}: is nested too deep") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        message = f"{path}: expected a mapping of settings, found {type(values).__name__}"
        raise ValueError(message)  # noqa: TRY004  a user's mistake
    return values


def _strict_loader(yaml: Any) -> Any:
    class StrictLoader(yaml.SafeLoader):  # type: ignore[misc]  # pyyaml is known at run time only
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

    StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
    return StrictLoader
