"""From estimate to verdict, and the record that a claim leaves."""

import json
from pathlib import Path
from typing import Any

import pytest

from reslab import claims
from reslab.claims import Check, Criterion, Outcome, Question, Record, Role, Verdict, criteria_model, judge, verdict
from reslab.schema import UserError, validate
from reslab.stats import Estimate


def estimate(low: float | None, high: float | None) -> Estimate:
    value = 0.0 if low is None or high is None else (low + high) / 2
    return Estimate(value=value, low=low, high=high, n=3)


# --- criteria -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("above", "below", "low", "high", "outcome"),
    [
        # above 1
        (1.0, None, 1.1, 2.0, "holds"),
        (1.0, None, 1.0, 2.0, "undecided"),
        (1.0, None, 0.5, 1.5, "undecided"),
        (1.0, None, 0.5, 1.0, "fails"),
        (1.0, None, 0.2, 0.5, "fails"),
        # below 1
        (None, 1.0, 0.2, 0.9, "holds"),
        (None, 1.0, 0.2, 1.0, "undecided"),
        (None, 1.0, 0.5, 1.5, "undecided"),
        (None, 1.0, 1.0, 1.5, "fails"),
        (None, 1.0, 1.2, 1.5, "fails"),
        # between 1 and 2
        (1.0, 2.0, 1.1, 1.9, "holds"),
        (1.0, 2.0, 0.2, 0.9, "fails"),
        (1.0, 2.0, 2.1, 2.9, "fails"),
        (1.0, 2.0, 0.9, 1.1, "undecided"),
        (1.0, 2.0, 1.9, 2.1, "undecided"),
        (1.0, 2.0, 0.5, 2.5, "undecided"),
        # points
        (1.0, None, 1.5, 1.5, "holds"),
        (1.0, None, 1.0, 1.0, "fails"),
        (None, 1.0, 0.0, 0.0, "holds"),
        (None, 1.0, 1.0, 1.0, "fails"),
        # no interval
        (1.0, None, None, None, "undecided"),
        (1.0, 2.0, None, None, "undecided"),
    ],
)
def test_judgement(
    above: float | None, below: float | None, low: float | None, high: float | None, outcome: Outcome
) -> None:
    assert Criterion(above=above, below=below).judge(estimate(low, high)) == outcome


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "needs a threshold"),
        ({"above": 1.0, "below": 1.0}, "no value can lie between"),
        ({"above": 2.0, "below": 1.0}, "no value can lie between"),
        ({"over": 1.0}, "did you mean"),
        ({"above": "1"}, "valid number"),
        ({"below": float("inf")}, "finite number"),
    ],
)
def test_impossible_criterion_is_refused(content: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match="criteria: ") as caught:
        validate(Criterion, content, "criteria")
    assert words in str(caught.value) or "valid are: above, below" in str(caught.value)


def test_criterion_in_words() -> None:
    assert str(Criterion(above=0.49, below=0.51)) == "above 0.49 and below 0.51"
    assert str(Criterion(below=1e-12)) == "below 1e-12"
    assert str(Criterion(above=0)) == "above 0"


# --- questions ------------------------------------------------------------------------------------

QUESTIONS = {
    "gap": Question("A1", "trained", "nats", "after {depth} blocks there is a gap"),
    "same": Question("A2.1", "control", "", "nothing changes"),
}


def test_every_question_needs_its_criterion() -> None:
    model = criteria_model(QUESTIONS)
    with pytest.raises(UserError, match="gap: missing"):
        validate(model, {"same": {"above": 0.0}}, "criteria")
    with pytest.raises(UserError, match="gapp: unknown parameter; did you mean 'gap'"):
        validate(model, {"same": {"above": 0.0}, "gap": {"above": 0.0}, "gapp": {"above": 0.0}}, "criteria")


def test_question_becomes_a_check() -> None:
    criteria = validate(criteria_model(QUESTIONS), {"gap": {"above": 1.0}, "same": {"below": 1.0}}, "criteria")
    [done] = judge(QUESTIONS, criteria, {"gap": estimate(2.0, 3.0)}, {"depth": 12, "width": 64})
    assert done == Check(
        sentence="A1",
        name="gap",
        statement="after 12 blocks there is a gap",
        role="trained",
        unit="nats",
        estimate=estimate(2.0, 3.0),
        criterion=Criterion(above=1.0),
        outcome="holds",
    )


# --- verdicts -------------------------------------------------------------------------------------


def checked(outcome: Outcome, role: Role = "trained", name: str = "gap") -> Check:
    return Check(
        sentence="A1",
        name=name,
        statement="there is a gap",
        role=role,
        unit="nats",
        estimate=estimate(0.1, 0.3),
        criterion=Criterion(above=0.0),
        outcome=outcome,
    )


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["holds"], "supported"),
        (["holds", "holds"], "supported"),
        (["holds", "fails"], "partly supported"),
        (["holds", "undecided"], "partly supported"),
        (["holds", "fails", "undecided"], "partly supported"),
        (["fails"], "refuted"),
        (["fails", "fails"], "refuted"),
        (["fails", "undecided"], "refuted"),
        (["undecided"], "inconclusive"),
        (["undecided", "undecided"], "inconclusive"),
        ([], "inconclusive"),
    ],
)
@pytest.mark.parametrize("role", ["trained", "exact"])
def test_verdict(outcomes: list[Outcome], expected: Verdict, role: Role) -> None:
    assert verdict([checked(outcome, role) for outcome in outcomes])[0] == expected
    control = checked("holds", "control")
    assert verdict([control, *(checked(outcome, role) for outcome in outcomes)])[0] == expected


@pytest.mark.parametrize("outcome", ["fails", "undecided"])
def test_lost_control_makes_the_claim_inconclusive(outcome: Outcome) -> None:
    for other in (checked("holds"), checked("fails")):
        found, because = verdict([other, checked(outcome, "control", "same")])
        assert found == "inconclusive"
        assert because == "control not met: same"


def test_reasons_name_what_does_not_hold() -> None:
    done = [checked("holds"), checked("fails", name="slope"), checked("undecided", name="rank")]
    assert verdict(done)[1] == "1 of 3 checks hold; fail: A1 slope; undecided: A1 rank"


def test_each_sentence_has_a_verdict_of_its_own() -> None:
    outcomes: dict[str, list[Outcome]] = {
        "A2.1": ["holds", "holds"],
        "A1": ["fails", "undecided"],
        "A2.2": ["holds", "fails"],
        "A3.1": ["undecided"],
    }
    done = [checked(o).model_copy(update={"sentence": s}) for s, of_s in outcomes.items() for o in of_s]
    done += [checked("holds", "control").model_copy(update={"sentence": "A3.2"})]
    assert list(claims.by_sentence(done).items()) == [
        ("A2.1", "supported"),
        ("A1", "refuted"),
        ("A2.2", "partly supported"),
        ("A3.1", "inconclusive"),
    ]
    assert claims.by_sentence([*done, checked("fails", "control")]) == {}


# --- records --------------------------------------------------------------------------------------


def record(**changed: Any) -> Record:
    content: dict[str, Any] = {
        "claim": "01_test",
        "title": "Größe",
        "statement": "It grows.",
        "scale": "smoke",
        "verdict": "supported",
        "because": "1 of 1 checks hold",
        "key": "gap",
        "checks": (checked("holds"), checked("holds", "control", "same")),
        "published": (),
        "arms": {"skip 1": {"learning_rate": 0.003, "test_loss": [2.5, None]}},
        "provenance": {"versions": {"torch": "2.13.0"}},
    }
    return Record(**content | changed)


def test_record_survives_the_disk(tmp_path: Path) -> None:
    path = claims.write(record(), tmp_path)
    assert path == tmp_path / "01_test.json"
    found = claims.read(path)
    assert found.model_dump(mode="json") == record().model_dump(mode="json")
    content = path.read_bytes()
    assert content.endswith(b"}\n")
    assert "Größe".encode() in content
    claims.write(found, tmp_path)
    assert path.read_bytes() == content


def test_older_record_is_refused(tmp_path: Path) -> None:
    path = claims.write(record(), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 0}))
    with pytest.raises(UserError, match=r"01_test\.json: a record of another version; run `dvc repro`"):
        claims.read(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1, 2]", b"null", b"<<<<<<< HEAD\n{}\n"])
def test_unreadable_record_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "01_test.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"01_test\.json: .*run `dvc repro`"):
        claims.read(path)


def test_missing_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"01_test\.json: not a readable claim record"):
        claims.read(tmp_path / "01_test.json")


def test_edited_record_is_refused_by_name(tmp_path: Path) -> None:
    path = claims.write(record(), tmp_path)
    path.write_text(path.read_text().replace('"verdict": "supported"', '"verdict": "proved"'))
    with pytest.raises(UserError, match=r"01_test\.json: verdict: input should be 'supported'"):
        claims.read(path)


def test_record_is_never_half_json(tmp_path: Path) -> None:
    """NaN is no JSON: other readers of the file would fail."""
    path = claims.write(record(arms={"skip 1": {"test_loss": [float("nan")]}}), tmp_path)
    assert "NaN" not in path.read_text()


def test_key_is_one_of_the_checks() -> None:
    with pytest.raises(UserError, match="key"):
        record(key="no such check")


def test_table_has_a_row_for_each_check() -> None:
    table = record().table()
    assert table["outcome"].tolist() == ["holds", "holds"]
    assert table["holds if"].tolist() == ["above 0", "above 0"]
