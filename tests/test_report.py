"""The scoreboard and the sentences it refers to."""

import csv
import shutil
import subprocess
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from reslab import claims, notebook, paths, report
from reslab.claims import Check, Criterion, Published, Record, Role
from reslab.schema import UserError
from reslab.stats import Estimate

NAME = "01_no_residual_collapse"


def check(name: str = "loss_gap", sentence: str = "A1", role: Role = "trained", **changed: Any) -> Check:
    content: dict[str, Any] = {
        "sentence": sentence,
        "name": name,
        "statement": f"statement of {name}",
        "role": role,
        "unit": "nats",
        "estimate": Estimate(value=0.512, low=0.4, high=0.6, n=3),
        "criterion": Criterion(above=0.3),
        "outcome": "holds",
    }
    return Check(**content | changed)


def record(*checks: Check, scale: str = "cpu", claim: str = NAME) -> Record:
    return Record(
        claim=claim,
        title="It collapses",
        statement="Without skips it collapses.",
        scale=scale,
        verdict="supported",
        because="1 of 1 checks hold",
        key="loss_gap",
        checks=checks or (check(), check("same", "A2.1", "control", outcome="undecided")),
        published=(Published(what="exponent", published="3", ours="2.98", source="a paper"),),
        arms={},
        provenance={},
    )


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "FIGURES", tmp_path)
    monkeypatch.setattr(notebook, "names", lambda: [NAME, "02_pre_and_post", "03_rezero"])
    return tmp_path


def tables(markdown: str) -> list[list[list[str]]]:
    """The cells of every table; a backslash escapes a bar."""
    found: list[list[list[str]]] = []
    lines = ["", *markdown.splitlines()]
    for before, line in pairwise(lines):
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            cells = line.replace("\\|", "&#124;").strip("|").split("|")
            found[-1].append([cell.strip() for cell in cells])
    return found


# --- sentences ------------------------------------------------------------------------------------


def test_sentences_are_those_of_the_document() -> None:
    sentences = report.sentences()
    assert {"A1", "A1r", "A2.1", "A3.1h", "A4.2c", "A7", "B2a", "B8"} <= sentences.keys()
    assert sentences["A3.1h"].startswith("Attention outputs stay in the convex hull of the values")
    rows = [
        line for line in (paths.ROOT / "docs/claims.md").read_text().splitlines() if line.startswith(("| A", "| B"))
    ]
    assert len(sentences) == len(rows)
    assert not {"id", "---"} & sentences.keys()


def questions() -> list[tuple[str, str]]:
    """Sentence id and number of the notebook of every question."""
    modules = [(name[:2], import_module(f"reslab.experiments.{name.split('_', 1)[1]}")) for name in notebook.names()]
    return [(question.sentence, number) for number, module in modules for question in module.QUESTIONS.values()]


def test_every_check_tests_a_sentence_of_the_document() -> None:
    assert questions()
    assert {sentence for sentence, _ in questions()} - report.sentences().keys() == set()


def test_every_notebook_tests_the_sentences_it_is_to_test() -> None:
    numbers = {name[:2] for name in notebook.names()}
    wanted = {(sentence, number) for sentence, where in report.assigned().items() for number in where}
    assert {pair for pair in wanted if pair[1] in numbers} == set(questions())


# --- the scoreboard -------------------------------------------------------------------------------


def test_no_record_is_a_user_error(figures: Path) -> None:
    for call in (report.write, report.scoreboard):
        with pytest.raises(UserError, match="no claim has been run yet; run `make repro` or `dvc repro`"):
            call()
    assert list(figures.iterdir()) == []


def test_report_is_written(figures: Path) -> None:
    claims.write(record(), figures)
    report.write()
    assert {path.name for path in figures.iterdir()} == {f"{NAME}.json", "README.md", "claims.csv"}
    board, checks, published, sentences = tables((figures / "README.md").read_text())
    assert board[2] == [
        "It collapses",
        "**supported**",
        "statement of loss_gap: 0.512 [0.4, 0.6] (n=3) nats: **holds**",
        f"[{NAME}.png]({NAME}.png)",
    ]
    assert checks[2] == [
        "A1",
        "loss_gap",
        "statement of loss_gap",
        "0.512 [0.4, 0.6] (n=3)",
        "nats",
        "above 0.3",
        "holds",
    ]
    assert checks[3][0] == "A2.1 (control)"
    assert published[2] == ["exponent", "3", "2.98", "a paper"]
    assert sentences[2][0] == "A1"
    assert sentences[2][2:] == ["01", "trained: 1 holds"]
    assert {row[0]: row[1] for row in sentences[2:]} == report.sentences()
    assert {row[3] for row in sentences[3:]} == {"not tested"}, "A2.1 has a control alone"


def test_csv_has_a_row_for_each_check(figures: Path) -> None:
    claims.write(record(), figures)
    report.write()
    with (figures / "claims.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["claim"], row["check"], row["role"], row["outcome"]) for row in rows] == [
        (NAME, "loss_gap", "trained", "holds"),
        (NAME, "same", "control", "undecided"),
    ]
    assert (rows[0]["estimate"], rows[0]["low"], rows[0]["high"], rows[0]["n"]) == ("0.512", "0.4", "0.6", "3")
    assert (rows[0]["above"], rows[0]["below"]) == ("0.3", "")


def test_report_is_the_same_on_a_rerun(figures: Path) -> None:
    claims.write(record(), figures)
    report.write()
    first = {path.name: path.read_bytes() for path in figures.iterdir()}
    report.write()
    assert {path.name: path.read_bytes() for path in figures.iterdir()} == first


def test_claims_come_in_the_order_of_their_notebooks(figures: Path) -> None:
    for claim in ("03_rezero", NAME):
        claims.write(record(claim=claim), figures)
    board = report.scoreboard()
    assert board.index(NAME) < board.index("03_rezero")
    assert "02_pre_and_post" not in board


def test_smoke_is_marked(figures: Path) -> None:
    claims.write(record(scale="smoke"), figures)
    report.write()
    assert "**supported (smoke: not meaningful)**" in (figures / "README.md").read_text()
    assert f"{NAME}  supported (smoke: not meaningful)" in report.scoreboard()
    claims.write(record(scale="cpu"), figures)
    assert "(smoke" not in report.scoreboard()


def test_scoreboard_shows_verdict_key_number_and_reason(figures: Path) -> None:
    claims.write(record(), figures)
    lines = [line.strip() for line in report.scoreboard().splitlines()]
    assert lines[:3] == [
        f"{NAME}  supported",
        "statement of loss_gap: 0.512 [0.4, 0.6] (n=3) nats: holds",
        "1 of 1 checks hold",
    ]


def test_each_sentence_has_its_verdict_where_no_control_is_lost(figures: Path) -> None:
    claims.write(record(check(), check("rank", "A2.2", outcome="fails")), figures)
    report.write()
    told = f"{check().sentence} supported, A2.2 refuted"
    assert f"By sentence: {told}." in (figures / "README.md").read_text()
    assert f"by sentence: {told}" in report.scoreboard()
    claims.write(record(check(), check("same", role="control", outcome="fails")), figures)
    assert "by sentence" not in report.scoreboard()


def test_a_lost_control_is_told_beside_the_sentence(figures: Path) -> None:
    lost = record(check(outcome="fails"), check("same", role="control", outcome="fails"), claim="03_rezero")
    claims.write(lost.model_copy(update={"verdict": "inconclusive"}), figures)
    claims.write(record(), figures)
    report.write()
    row = tables((figures / "README.md").read_text())[-1][2]
    assert row[2:] == ["01, 03", "trained: 1 holds, 1 fails; a control is not met in 03"]


def test_what_holds_untrained_is_counted_by_itself(figures: Path) -> None:
    checks = [check(), check("b", outcome="undecided"), check("c", role="exact"), check("d", role="measured")]
    claims.write(record(*checks), figures)
    report.write()
    row = tables((figures / "README.md").read_text())[-1][2]
    assert row[3] == "untrained: 1 holds; trained: 1 holds, 1 undecided; measured: 1 holds"


def test_arms_at_the_edge_of_their_rates_are_told_apart(figures: Path) -> None:
    """Their names may have commas."""
    arms = {"Pre-LN, 6 blocks": {"at_edge_of_grid": True}, "Full, 6": {"at_edge_of_grid": True}, "Block": {}}
    claims.write(record().model_copy(update={"arms": arms}), figures)
    report.write()
    assert "may lie beyond: Pre-LN, 6 blocks; Full, 6.\n" in (figures / "README.md").read_text()


def test_bars_in_a_cell_do_not_split_it(figures: Path) -> None:
    claims.write(record(check(unit="|ln factor| per block", statement="|g| passes")), figures)
    report.write()
    for table in tables((figures / "README.md").read_text()):
        assert {len(row) for row in table} == {len(table[0])}


def test_check_of_an_unknown_sentence_is_named(figures: Path) -> None:
    claims.write(record(check(sentence="A99")), figures)
    with pytest.raises(UserError, match="A99"):
        report.write()


def test_readme_tells_the_committed_verdicts() -> None:
    """Skipped where figures/ was made anew since the last commit: then the README may lag behind."""
    command = ["git", "-C", str(paths.ROOT), "diff", "--quiet", "HEAD", "--", "figures"]
    if shutil.which("git") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("figures/ differs from the last commit, or this is no git clone")
    rows = [line for line in (paths.ROOT / "README.md").read_text().splitlines() if line.startswith("| [`")]
    found = {name: claims.read(paths.FIGURES / f"{name}.json") for name in notebook.names()}
    assert len(rows) == len(found)
    for row, (name, committed) in zip(rows, found.items(), strict=True):
        assert name in row
        assert committed.scale == "cpu"
        assert row.split("|")[3].strip().split(":")[0] == committed.verdict
