"""From criterion to verdict: a claim is a set of checks, and each check was given its threshold before any data."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import pandas as pd
from pydantic import create_model, model_validator

from reslab.files import write_atomic
from reslab.schema import Settings, UserError, validate
from reslab.stats import Estimate

if TYPE_CHECKING:
    from reslab.params import Params

__all__ = [
    "Check",
    "Criterion",
    "Outcome",
    "Published",
    "Question",
    "Record",
    "Role",
    "Section",
    "Verdict",
    "by_sentence",
    "criteria_model",
    "judge",
    "read",
    "verdict",
    "write",
]

Outcome = Literal["holds", "fails", "undecided"]
Role = Literal["exact", "trained", "measured", "control"]
"""exact: at the initial weights; trained: needs training; measured: a time of this machine, which differs from run to
run; control: must hold for the others to mean anything."""
Verdict = Literal["supported", "partly supported", "refuted", "inconclusive"]

SCHEMA = 1
"""Version of `Record`."""


class Criterion(Settings):
    """Where an estimate must lie for the sentence to hold: above, below, or between two thresholds."""

    above: float | None = None
    below: float | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> "Criterion":
        if self.above is None and self.below is None:
            raise ValueError("a criterion needs a threshold; give above, below or both")
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError(f"above {self.above} is not less than below {self.below}; no value can lie between")
        return self

    def judge(self, estimate: Estimate) -> Outcome:
        """`holds` or `fails` when the whole interval lies on one side; `undecided` across, or without interval."""
        if estimate.low is None or estimate.high is None:
            return "undecided"
        low = float("-inf") if self.above is None else self.above
        high = float("inf") if self.below is None else self.below
        if low < estimate.low and estimate.high < high:
            return "holds"
        return "fails" if estimate.high <= low or estimate.low >= high else "undecided"

    def __str__(self) -> str:
        parts = [("above", self.above), ("below", self.below)]
        return " and ".join(f"{word} {value:g}" for word, value in parts if value is not None)


class Check(Settings):
    """One sentence, or part of one, put to the test."""

    sentence: str
    """Id in docs/claims.md of the sentence that is tested."""
    name: str
    """Name of the criterion in params.yaml."""
    statement: str
    """What holds if the criterion is met."""
    role: Role
    unit: str
    estimate: Estimate
    criterion: Criterion
    outcome: Outcome


class Published(Settings):
    """A published number beside ours."""

    what: str
    published: str
    ours: str
    source: str


class Record(Settings):
    """What a claim's notebook leaves behind."""

    schema_version: int = SCHEMA
    claim: str
    title: str
    statement: str
    scale: str
    verdict: Verdict
    because: str
    key: str
    """Name of the check that the scoreboard shows."""
    checks: tuple[Check, ...]
    published: tuple[Published, ...]
    arms: dict[str, Any]
    """What the experiment chose and measured beyond the checks, such as learning rates and losses by arm."""
    provenance: dict[str, Any]

    @model_validator(mode="after")
    def _key_is_a_check(self) -> "Record":
        if self.key not in [check.name for check in self.checks]:
            raise ValueError(f"key '{self.key}' is the name of none of the checks")
        return self

    @property
    def shown_verdict(self) -> str:
        """The verdict, and that it says nothing where the scale is smoke."""
        return self.verdict + (" (smoke: not meaningful)" if self.scale == "smoke" else "")

    def table(self) -> pd.DataFrame:
        """The checks, one a row, for reading."""
        rows = [
            {
                "sentence": check.sentence,
                "check": check.statement,
                "kind": check.role,
                "estimate [95 % interval]": str(check.estimate),
                "unit": check.unit,
                "holds if": str(check.criterion),
                "outcome": check.outcome,
            }
            for check in self.checks
        ]
        return pd.DataFrame(rows)


class Question(NamedTuple):
    """What a check asks, before any data."""

    sentence: str
    """Id in docs/claims.md of the sentence that is tested."""
    role: Role
    unit: str
    statement: str
    """What holds if the criterion is met; may name parameters in braces."""


class Section(Settings):
    """A claim's section of params.yaml; each has a field `criteria`, made by `criteria_model`."""

    def require(self, params: "Params") -> None:
        """A ValueError where the rest of the parameters does not fit this claim."""


def criteria_model(questions: Mapping[str, Question]) -> type[Settings]:
    """The settings that hold one `Criterion` for each question; a missing or misspelt one is refused by name."""
    fields: dict[str, Any] = dict.fromkeys(questions, (Criterion, ...))
    return create_model("Criteria", __base__=Settings, **fields)


def judge(
    questions: Mapping[str, Question], criteria: Settings, estimates: Mapping[str, Estimate], numbers: Mapping[str, Any]
) -> list[Check]:
    """One check for each estimate, judged by the criterion of its name; `numbers` fill the braces of statements."""
    checks = []
    for name, estimate in estimates.items():
        question, criterion = questions[name], getattr(criteria, name)
        checks.append(
            Check(
                sentence=question.sentence,
                name=name,
                statement=question.statement.format(**numbers),
                role=question.role,
                unit=question.unit.format(**numbers),
                estimate=estimate,
                criterion=criterion,
                outcome=criterion.judge(estimate),
            )
        )
    return checks


def verdict(checks: Sequence[Check]) -> tuple[Verdict, str]:
    """The verdict over `checks`, and one sentence why.

    Controls first: one that does not hold makes the whole inconclusive. Then: all hold, supported;
    none holds and one fails, refuted; none holds or fails, inconclusive; all else, partly supported.
    """
    lost = [c.name for c in checks if c.role == "control" and c.outcome != "holds"]
    if lost:
        return "inconclusive", f"control not met: {', '.join(lost)}"
    claims = [c for c in checks if c.role != "control"]
    counts = {outcome: [c for c in claims if c.outcome == outcome] for outcome in get_args(Outcome)}
    controls = len(checks) - len(claims)
    because = f"{len(counts['holds'])} of {len(claims)} checks hold" + (
        f" ({controls} controls met)" if controls else ""
    )
    for outcome, word in (("fails", "fail"), ("undecided", "undecided")):
        if counts[outcome]:
            because += f"; {word}: " + ", ".join(f"{c.sentence} {c.name}" for c in counts[outcome])
    return _word([c.outcome for c in claims]), because


def _word(outcomes: Sequence[Outcome]) -> Verdict:
    if "holds" not in outcomes:
        return "refuted" if "fails" in outcomes else "inconclusive"
    return "supported" if set(outcomes) == {"holds"} else "partly supported"


def by_sentence(checks: Sequence[Check]) -> dict[str, Verdict]:
    """The verdict on each sentence by itself, in the order of the checks: one that holds says nothing of another.

    None (empty) where a control does not hold, for then nothing is said.
    """
    if any(c.role == "control" and c.outcome != "holds" for c in checks):
        return {}
    claims = [c for c in checks if c.role != "control"]
    sentences = dict.fromkeys(c.sentence for c in claims)
    return {sentence: _word([c.outcome for c in claims if c.sentence == sentence]) for sentence in sentences}


def write(record: Record, folder: Path) -> Path:
    """Write `record` as `folder`/<claim>.json: the last file of a claim, and the sign that it is complete."""
    path = folder / f"{record.claim}.json"
    text = json.dumps(record.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(path, (text + "\n").encode())
    return path


def read(path: Path) -> Record:
    """A claim's record; a UserError when it is no record, or one of another version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable claim record ({error}); run `dvc repro` to make it again") from None
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA:
        raise UserError(f"{path}: a record of another version; run `dvc repro` to make it again")
    return validate(Record, content, str(path))
