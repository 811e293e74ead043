"""The quick ways through a run's bytes say the same as the plain ones."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.supervisor.records import dump, dump_text
from orchestrator.supervisor.seals import SEAL_LINE, seal_lines

SEAL = b'{"seq":3,"t":1.5,"kind":"seal","bytes":9,"sha256":"' + b"a" * 64 + b'"}\n'
NO_SEALS = (
    b'{"seq":4,"t":1.5,"kind":"event","event":{"x":1,"kind":"seal","bytes":9,"kind":"seal",}}\n',
    b' {"seq":3,"t":1.5,"kind":"seal","bytes":9,"sha256":"' + b"a" * 64 + b'"}\n',
    b'{"seq":5,"t":1.5,"kind":"out","text":"plain"}\n',
    b"\n",
)


@given(st.text(st.characters(codec=None)))
@example("".join(map(chr, range(0x180))))
@example("\u2028 \x7f \x85 \ud800")
def test_text_goes_into_a_record_as_json_spells_it(text: str) -> None:
    assert dump_text(text) == dump(text).encode()
    assert json.loads(dump_text(text)) == text


@given(st.lists(st.sampled_from((SEAL, *NO_SEALS))))
def test_seals_are_found_where_they_are_lines_and_nowhere_else(lines: list[bytes]) -> None:
    data = b"".join(lines)
    found = [match.span() for match in seal_lines(data)]
    assert found == [match.span() for match in SEAL_LINE.finditer(data)]
    assert len(found) == lines.count(SEAL)
