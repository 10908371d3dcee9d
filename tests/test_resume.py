"""What a kill leaves is cut to what is whole: torn lines go, and events end where completions do."""

from pathlib import Path

import pytest

from specgen.events import Finished, Resumed, read, to_line
from specgen.report import fold
from specgen.resume import read_rows, recover
from tests.streams import request

EVENTS = [
    *request("a", [(2, 1), (2, 2)]),
    *request('{"event":"finished","sequence":"x"', [(2, 0)]),
    *request("c", [(2, 2)]),
]
LINES = [to_line(event) + "\n" for event in EVENTS]
ROWS = ['{"id":"a"}\n', '{"id":"{\\"event\\":\\"finished\\",\\"sequence\\":\\"x\\""}\n', '{"id":"c"}\n']
ENDS = [at + 1 for at, event in enumerate(EVENTS) if isinstance(event, Finished)]


def left(path: Path, completions: str, events: str) -> tuple[list[str], list[str]]:
    """What is in the files when a run goes on: ids, and the lines of events before the mark."""
    files = path / "completions.jsonl", path / "events.jsonl"
    for file, text in zip(files, (completions, events), strict=True):
        file.write_text(text)
    recover(*files)
    *lines, mark = files[1].read_text().splitlines(keepends=True) or [""]
    assert mark == (to_line(Resumed(time=0.0)) + "\n" if lines else "")
    return [row["id"] for row in read_rows(files[0])], lines


@pytest.mark.parametrize("done", range(4))
@pytest.mark.parametrize("torn", ["", '{"id":"half'])
def test_events_end_where_the_first_completion_is_missing(tmp_path: Path, done: int, torn: str) -> None:
    ids, lines = left(tmp_path, "".join(ROWS[:done]) + torn, "".join(LINES))
    assert len(ids) == done
    assert lines == (LINES[: ENDS[done] - 1] if done < 3 else LINES)


@pytest.mark.parametrize("cut", range(0, sum(map(len, LINES)), 37))
def test_a_torn_line_goes_wherever_it_is_torn(tmp_path: Path, cut: int) -> None:
    _, lines = left(tmp_path, "", "".join(LINES)[:cut])
    assert "".join(LINES).startswith("".join(lines))
    assert len(lines) == min("".join(LINES)[:cut].count("\n"), ENDS[0] - 1)


def test_a_run_that_goes_on_reports_what_one_without_a_kill_does(tmp_path: Path) -> None:
    files = tmp_path / "completions.jsonl", tmp_path / "events.jsonl"
    files[0].write_text("".join(ROWS[:1]))
    files[1].write_text("".join(LINES[:-3]))
    recover(*files)
    with files[1].open("a") as file:
        file.writelines(LINES[ENDS[0] :])
    whole, resumed = fold(EVENTS, num_spec_tokens=2), fold(read(files[1]), num_spec_tokens=2)
    assert resumed.speculation == whole.speculation
    assert resumed.finish_reasons == whole.finish_reasons
    assert (resumed.num_prompt_tokens, resumed.num_unfinished) == (15, 0)
    assert resumed.wall_seconds > whole.wall_seconds, "what was done twice took its time twice"
