"""Progress: which display is chosen, what it shows, and how often."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from reslab import progress
from reslab.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture(autouse=True)
def _plain_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESLAB_PROGRESS", raising=False)
    monkeypatch.delenv("CI", raising=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# --- logs -----------------------------------------------------------------------------------------


def test_log_has_at_most_a_line_a_minute(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Progress("training", 600)
    for second in range(300):
        clock.now = 1000.0 + second
        shown.update(second, f"{second} runs")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "  0% training: 0 runs, time left not known yet",
        " 10% training: 60 runs, 9 min left",
        " 20% training: 120 runs, 8 min left",
        " 30% training: 180 runs, 7 min left",
        " 40% training: 240 runs, 6 min left",
    ]


def test_next_sweep_is_announced_at_once(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """One display can outlive a sweep: the runner shows what its notebook reports, sweep after sweep."""
    shown = progress.display()
    for text in ("choosing: 0/2", "choosing: 1/2", "training: 0/9", "training: 1/9"):
        clock.now += 1
        shown.show(0.5, text)
    assert capsys.readouterr().err.splitlines() == [" 50% choosing: 0/2", " 50% training: 0/9"]


# --- the choice of a display ----------------------------------------------------------------------


def test_ci_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.chdir(tmp_path)
    with Progress("training", 10) as shown:
        shown.update(5, "half")
    out, err = capsys.readouterr()
    assert (out, err, list(tmp_path.iterdir())) == ("", "", [])


def test_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("training", 10) as shown:
        shown.update(5, "half")
    assert " 50%|" in terminal.getvalue()
    assert "training: half" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")  # and the bar is gone when it is done


def test_notebook_run_reports_to_its_runner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before all else: also in CI and in a terminal the runner's file is used."""
    path = tmp_path / "progress"
    monkeypatch.setenv("RESLAB_PROGRESS", str(path))
    monkeypatch.setenv("CI", "true")
    with Progress("training", 10) as shown:
        shown.update(2.5, "a quarter")
        fraction, text = json.loads(path.read_text())
        assert fraction == 0.25
        assert text.startswith("training: a quarter, ")
        assert list(tmp_path.iterdir()) == [path]
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_display_without_a_file_closes_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RESLAB_PROGRESS", str(tmp_path / "progress"))
    with Progress("training", 10):
        pass
    assert list(tmp_path.iterdir()) == []


# --- time left ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("done", "seconds", "words"),
    [
        (0, 50, "  0% x: note, time left not known yet"),
        (5, 30, " 50% x: note, 30 s left"),
        (2, 30, " 20% x: note, 2 min left"),
        (1, 600, " 10% x: note, 90 min left"),
        (10, 30, "100% x: note, 0 s left"),
        (12, 30, "100% x: note, 0 s left"),
    ],
)
def test_time_left(clock: Clock, capsys: pytest.CaptureFixture[str], done: float, seconds: float, words: str) -> None:
    shown = Progress("x", 10)
    clock.now += seconds
    shown.update(done, "note")
    assert capsys.readouterr().err == words + "\n"


def test_no_work_is_done_at_once(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    Progress("x", 0).update(0, "note")
    assert capsys.readouterr().err == "100% x: note, 0 s left\n"
