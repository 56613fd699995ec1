"""The scoreboard: every claim's verdict, its key number and its figure, made from the records in figures/."""

import io
from pathlib import Path
from typing import get_args

import pandas as pd

from reslab import claims, notebook, paths
from reslab.claims import Check, Outcome, Record
from reslab.files import write_atomic
from reslab.schema import UserError, did_you_mean

__all__ = ["assigned", "scoreboard", "sentences", "write"]


def _rows() -> list[list[str]]:
    """The cells of the table in docs/claims.md: id, sentence, notebooks."""
    lines = (paths.ROOT / "docs" / "claims.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return cells[2:]


def sentences() -> dict[str, str]:
    """The sentences of docs/claims.md by id."""
    return {row[0]: row[1] for row in _rows()}


def assigned() -> dict[str, list[str]]:
    """Of each sentence of docs/claims.md the numbers of the notebooks that test it, such as "02"."""
    return {row[0]: [number.strip() for number in row[2].split(",")] for row in _rows()}


def records() -> list[Record]:
    """The records in figures/, in the order of the notebooks; a UserError when there are none."""
    found = [paths.FIGURES / f"{name}.json" for name in notebook.names()]
    found = [path for path in found if path.exists()]
    if not found:
        raise UserError(f"{paths.FIGURES}: no claim has been run yet; run `make repro` or `dvc repro`")
    return [claims.read(path) for path in found]


def _key(record: Record) -> Check:
    return next(check for check in record.checks if check.name == record.key)


def _by_sentence(record: Record) -> str:
    """The verdicts on a claim's sentences, such as "A2.1 supported, A2.2 refuted"; empty where a control is lost."""
    return ", ".join(f"{sentence} {word}" for sentence, word in claims.by_sentence(record.checks).items())


def _row(*cells: object) -> str:
    """A row of a Markdown table; bars in cells are escaped."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _known(texts: dict[str, str], sentence: str) -> None:
    if sentence not in texts:
        raise UserError(f"docs/claims.md: has no sentence '{sentence}'; {did_you_mean(sentence, texts)}")


def _markdown(found: list[Record]) -> str:
    lines = [
        "# Scoreboard",
        "",
        "Made by `dvc repro`; do not edit. A check holds when its whole 95 % interval meets the criterion that",
        "stood in `params.yaml` before the run. n is the number of seeds, of measured times that of rounds; a count",
        "or a maximum over all seeds has n=1. An interval [x, x] says that all seeds gave x: of a count, or of",
        "steps in a list of rates, that is its resolution and no certainty. Measured times differ from run to run.",
        "",
        "| claim | verdict | key check | figure |",
        "|---|---|---|---|",
    ]
    for record in found:
        key = _key(record)
        number = f"{key.statement}: {key.estimate} {key.unit}: **{key.outcome}**"
        picture = f"[{record.claim}.png]({record.claim}.png)"
        lines.append(_row(record.title, f"**{record.shown_verdict}**", number, picture))
    for record in found:
        lines += [
            "",
            f"## {record.claim}",
            "",
            record.statement,
            "",
            f"**{record.shown_verdict}**: {record.because}.",
        ]
        if alone := _by_sentence(record):
            lines += ["", f"By sentence: {alone}."]
        lines += ["", f"![{record.title}]({record.claim}.png)", ""]
        lines += [
            "| sentence | name | check | estimate [95 % interval] | unit | holds if | outcome |",
            "|---|---|---|---|---|---|---|",
        ]
        for check in record.checks:
            sentence = check.sentence if check.role != "control" else f"{check.sentence} (control)"
            lines.append(
                _row(sentence, check.name, check.statement, check.estimate, check.unit, check.criterion, check.outcome)
            )
        if edges := [name for name, arm in record.arms.items() if arm.get("at_edge_of_grid")]:
            lines += [
                "",
                f"Best rate at the edge of the rates tried, so a better one may lie beyond: {'; '.join(edges)}.",
            ]
        if record.published:
            lines += ["", "| published | their number | ours | source |", "|---|---|---|---|"]
            lines += [_row(p.what, p.published, p.ours, p.source) for p in record.published]
    texts = sentences()
    for record in found:
        for check in record.checks:
            _known(texts, check.sentence)
    lines += ["", "## The sentences", "", "| id | sentence | tested by | outcomes of its checks |", "|---|---|---|---|"]
    lines += [_row(sentence, text, *_tested(sentence, found)) for sentence, text in texts.items()]
    return "\n".join(lines) + "\n"


def _tested(sentence: str, found: list[Record]) -> tuple[str, str]:
    """The notebooks that test a sentence, and how often its checks hold, fail or stay undecided.

    By what they look at: what holds at initialisation by a proof is no evidence of what training does.
    """
    testing = [r for r in found if any(c.sentence == sentence and c.role != "control" for c in r.checks)]
    checks = [c for r in testing for c in r.checks if c.sentence == sentence]
    counted = [
        f"{told}: {_counted(of_role)}"
        for role, told in (("exact", "untrained"), ("trained", "trained"), ("measured", "measured"))
        if (of_role := [c.outcome for c in checks if c.role == role])
    ]
    lost = [r.claim[:2] for r in testing if r.verdict == "inconclusive"]
    counted += [f"a control is not met in {', '.join(lost)}"] if lost else []
    return ", ".join(r.claim[:2] for r in testing), "; ".join(counted) or "not tested"


def _counted(outcomes: list[Outcome]) -> str:
    return ", ".join(f"{outcomes.count(o)} {o}" for o in get_args(Outcome) if o in outcomes)


def _csv(found: list[Record]) -> str:
    rows = [
        {
            "claim": record.claim,
            "scale": record.scale,
            "verdict": record.verdict,
            "sentence": check.sentence,
            "check": check.name,
            "role": check.role,
            "estimate": check.estimate.value,
            "low": check.estimate.low,
            "high": check.estimate.high,
            "n": check.estimate.n,
            "unit": check.unit,
            "above": check.criterion.above,
            "below": check.criterion.below,
            "outcome": check.outcome,
        }
        for record in found
        for check in record.checks
    ]
    buffer = io.StringIO()
    pd.DataFrame(rows).to_csv(buffer, index=False, lineterminator="\n")
    return buffer.getvalue()


def write(folder: Path | None = None) -> None:
    """Write README.md and claims.csv into figures/."""
    folder, found = folder or paths.FIGURES, records()
    write_atomic(folder / "README.md", _markdown(found).encode())
    write_atomic(folder / "claims.csv", _csv(found).encode())


def scoreboard() -> str:
    """The scoreboard for a terminal."""
    found = records()
    width = max(len(record.claim) for record in found)
    lines = []
    for record in found:
        key = _key(record)
        lines.append(f"{record.claim:{width}}  {record.shown_verdict}")
        lines.append(f"{'':{width}}  {key.statement}: {key.estimate} {key.unit}: {key.outcome}")
        lines.append(f"{'':{width}}  {record.because}")
        if alone := _by_sentence(record):
            lines.append(f"{'':{width}}  by sentence: {alone}")
    lines.append(f"figures and every check: {paths.FIGURES / 'README.md'}")
    return "\n".join(lines)
