"""What stands in data files, one record at a time, each with its place.

Knows containers: lines of JSONL, whole text files, rows of Arrow and parquet. What a record may hold is
records.py's matter. No file is held in memory as a whole, except a text file, which is one document.

    corpus.jsonl        one JSON object per line
    notes.txt, a.md     one document per file
    rows.parquet        streamed by `datasets`; rows.arrow and a folder of `save_to_disk` are mapped
    a folder            every such file below it, in the order of their paths
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINES = (".jsonl", ".json")
TEXTS = (".txt", ".md")
ARROW = ".arrow"
PARQUET = ".parquet"
SAVED = "state.json"  # stands in every folder that `datasets` saved


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A record, or what is wrong with the line where one should stand; `place` is "file.jsonl:7"."""

    place: str
    record: dict[str, Any] | None = None
    problem: str = ""


def find_files(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """Return the files (and saved datasets) behind paths, in the order given, folders in path order.

    Raises:
        ValueError: a path is not there, has a suffix that nothing reads, or is a folder without data.
    """
    return tuple(file for path in paths for file in _below(Path(path)))


def read_entries(files: Iterable[Path]) -> Iterator[Entry]:
    """Yield the entries of files that `find_files` found.

    Raises:
        ValueError: a file cannot be read at all.
    """
    for file in files:
        try:
            yield from _read(file)
        except OSError as error:
            raise ValueError(f"cannot read {file}: {error.strerror or error}") from error


def _below(path: Path) -> Iterator[Path]:
    if _is_data(path):
        yield path
        return
    if not path.exists():
        raise ValueError(f"no data at {path}: there is no such file or folder")
    if not path.is_dir():
        known = ", ".join((*LINES, *TEXTS, ARROW, PARQUET))
        raise ValueError(f"cannot tell what {path} holds; rename it to one of {known}")
    saved = [found.parent for found in path.rglob(SAVED)]
    files = [file for file in path.rglob("*") if _is_data(file) and not set(file.parents) & set(saved)]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise ValueError(f"no data in the folder {path}; its files end in none of the known suffixes")
    yield from sorted(files)


def _is_data(path: Path) -> bool:
    if path.is_dir():
        return (path / SAVED).is_file()
    return path.is_file() and path.suffix in {*LINES, *TEXTS, ARROW, PARQUET} and path.name != SAVED


def _read(file: Path) -> Iterator[Entry]:
    if file.suffix in TEXTS:
        yield _read_text(file)
    elif file.is_dir() or file.suffix in {ARROW, PARQUET}:
        yield from _read_table(file)
    else:
        yield from _read_lines(file)


def _read_text(file: Path) -> Entry:
    try:
        return Entry(place=str(file), record={"text": file.read_text(encoding="utf-8")})
    except UnicodeDecodeError as error:
        return Entry(place=str(file), problem=f"is not UTF-8 at byte {error.start}")


def _read_lines(file: Path) -> Iterator[Entry]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1 and line.lstrip().startswith(b"["):
                raise ValueError(
                    f"{file} is one JSON list, which cannot be streamed; "
                    f"write one object per line: jq -c '.[]' {file.name} > {file.stem}.jsonl"
                )
            if line.strip():
                yield _parse(line.rstrip(), f"{file}:{number}")


def _parse(line: bytes, place: str) -> Entry:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return Entry(place=place, problem=f"is not UTF-8 at byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return Entry(place=place, problem=f"is no JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # an integer of too many digits; too many brackets
        return Entry(place=place, problem=f"is no JSON that can be read: {error}")
    if not isinstance(record, dict):
        return Entry(place=place, problem=f"holds a JSON {type(record).__name__}, not an object")
    return Entry(place=place, record=record)


def _read_table(file: Path) -> Iterator[Entry]:
    for number, row in enumerate(_rows(file), start=1):
        # Columns that other rows have and this one lacks are None there.
        record = {name: value for name, value in row.items() if value is not None}
        yield Entry(place=f"{file}:{number}", record=record)


def _rows(file: Path) -> Iterable[dict[str, Any]]:
    import datasets  # noqa: PLC0415  takes a second, and JSONL needs none of it
    from pyarrow import ArrowException  # noqa: PLC0415  comes with datasets

    try:
        if file.is_dir():
            rows: Iterable[dict[str, Any]] = datasets.load_from_disk(str(file))
        elif file.suffix == ARROW:
            rows = datasets.Dataset.from_file(str(file))
        else:
            rows = datasets.load_dataset("parquet", data_files=[str(file)], split="train", streaming=True)
        yield from rows
    except (ArrowException, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
