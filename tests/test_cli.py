"""Exit codes and messages: 0 done, 1 failed, 2 the user's input is wrong, said in one line."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import clones
from reslab import claims, cli, paths, stats
from reslab.runner import RunFailed


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> clones.Clone:
    return clones.clone(tmp_path_factory.mktemp("cli") / "project", git=False)


@pytest.fixture(autouse=True)
def here(project: clones.Clone, monkeypatch: pytest.MonkeyPatch) -> Iterator[clones.Clone]:
    """`reslab` works in the clone, whose params.yaml and figures/ are new for each test."""
    clones.redirect(monkeypatch, project.root)
    for name in ("MAKELEVEL", "DVC_STAGE"):
        monkeypatch.delenv(name, raising=False)
    at_termination = signal.getsignal(signal.SIGTERM)
    before = (project.root / "params.yaml").read_text()
    yield project
    (project.root / "params.yaml").write_text(before)
    signal.signal(signal.SIGTERM, at_termination)


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says; it must end with 2 and say it in one line."""
    code = cli.main(arguments)
    said = capsys.readouterr()
    assert code == 2, said.err
    assert all(line.startswith("reslab: checking ") for line in said.out.splitlines())
    assert said.err.startswith("reslab: ")
    assert said.err.count("\n") == 1, said.err
    return said.err


COMMANDS = [["run", clones.NOTEBOOK], ["repro"]]


@pytest.fixture(params=COMMANDS, ids=["run", "repro"])
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Both ways to start a heavy run; neither may get as far as a kernel or DVC."""

    def started(*arguments: object) -> None:
        raise AssertionError("started, though the input is wrong")

    monkeypatch.setattr("reslab.runner._execute", started)
    monkeypatch.setattr("dvc.cli.main", started)
    arguments: list[str] = request.param
    return arguments


# --- wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["run", "clean"])
def test_unknown_notebook(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused([verb, "01_no_residual_colapse"], capsys)
    assert "no notebook '01_no_residual_colapse'" in said
    assert f"did you mean '{clones.NOTEBOOK}'?" in said


def test_misspelt_parameter(here: clones.Clone, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    here.change("optimisation.warmup", None)
    here.change("optimisation.warm_up", 0.1)
    code = cli.main(command)
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert any("params.yaml: optimisation.warm_up: unknown parameter; did you mean 'warmup'?" in line for line in lines)
    assert all(line.startswith("reslab: params.yaml: optimisation.warm") for line in lines)


def test_parameter_of_the_wrong_type(
    here: clones.Clone, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    here.change("sweep.steps", "six")
    said = _refused(command, capsys)
    assert "params.yaml: sweep.steps: " in said
    assert "'six'" in said


def test_params_that_are_no_yaml(here: clones.Clone, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (here.root / "params.yaml").write_text("scale: [smoke\n")
    assert "params.yaml: not valid YAML" in _refused(command, capsys)


def test_missing_params(here: clones.Clone, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (here.root / "params.yaml").unlink()
    assert "params.yaml: cannot read it (No such file" in _refused(command, capsys)


def test_missing_corpus(here: clones.Clone, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    here.change("corpus.source", "texts/mine.txt")
    said = _refused(command, capsys)
    assert "texts/mine.txt: cannot read it (No such file" in said


def test_checksum_mismatch(here: clones.Clone, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    here.change("corpus.sha256", "0" * 64)
    said = _refused(command, capsys)
    assert "corpus pandas: SHA-256 is " in said
    assert "install the pinned version" in said
    assert "0" * 64 in said


def test_cuda_absent(
    here: clones.Clone, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here.change("device.kind", "cuda")
    said = _refused(command, capsys)
    assert "device.kind: cuda asked for, but PyTorch finds no CUDA device" in said
    assert "set device.kind to cpu" in said


def test_low_precision_on_the_cpu(here: clones.Clone, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    here.change("device.precision", "bfloat16")
    assert "params.yaml: device: precision bfloat16 needs kind: cuda" in _refused(command, capsys)


@pytest.mark.parametrize("folder", ["figures", "runs"])
def test_folder_that_cannot_be_written(
    here: clones.Clone, command: list[str], capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    shutil.rmtree(here.root / folder, ignore_errors=True)
    (here.root / folder).write_text("in the way")
    try:
        said = _refused(command, capsys)
    finally:
        (here.root / folder).unlink()
    assert f"{here.root / folder}: cannot write here" in said


def test_notebook_without_parameters_tag(
    here: clones.Clone, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = here.root / "notebooks" / f"{clones.NOTEBOOK}.ipynb"
    before = path.read_text()
    path.write_text(before.replace('"parameters"', '"parameter"'))
    try:
        said = _refused(command, capsys)
    finally:
        path.write_text(before)
    assert f"{path}: 0 cells are tagged 'parameters'" in said


def test_unknown_scale(here: clones.Clone, capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused(["repro", "--scale", "smok"], capsys)
    assert "unknown scale 'smok'; did you mean 'smoke'?" in said
    assert not list((here.root / "build").glob("scale-*"))


@pytest.mark.parametrize("verb", ["scoreboard", "report"])
def test_no_records_yet(verb: str, here: clones.Clone, capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused([verb], capsys)
    assert "no claim has been run yet; run `make repro` or `dvc repro`" in said
    assert not (here.root / "figures" / "README.md").exists()


def test_damaged_record(here: clones.Clone, capsys: pytest.CaptureFixture[str]) -> None:
    path = here.root / "figures" / f"{clones.NOTEBOOK}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"schema_version": 1, "claim"')
    try:
        said = _refused(["scoreboard"], capsys)
    finally:
        path.unlink()
    assert f"{path}: not a readable claim record" in said


# --- the other exit codes -------------------------------------------------------------------------


def test_failed_run_is_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RunFailed(f"{name}: its kernel died")

    monkeypatch.setattr("reslab.runner.run", fail)
    assert cli.main(["run", clones.NOTEBOOK]) == 1
    assert capsys.readouterr().err == f"reslab: {clones.NOTEBOOK}: its kernel died\n"


def test_interrupted_run_is_130_and_says_that_nothing_is_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("reslab.runner.run", interrupt)
    assert cli.main(["run", clones.NOTEBOOK]) == 130
    assert "run the same again to continue" in capsys.readouterr().err


def test_failed_pipeline_is_1_and_says_how_to_go_on(
    here: clones.Clone, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    def fail(arguments: list[str]) -> int:
        called.append(arguments)
        return 255

    monkeypatch.setattr("dvc.cli.main", fail)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert cli.main(["repro", "--", "--force", "scoreboard"]) == 1
    assert called == [["--cd", str(here.root), "repro", "--force", "scoreboard"]]
    said = capsys.readouterr()
    assert all(line.startswith("reslab: checking ") for line in said.out.splitlines())
    assert "run the same again to continue" in said.err
    assert "figures" in said.err


def test_failed_pipeline_in_a_tarball_does_not_send_the_user_to_git(
    here: clones.Clone, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC deletes the figures before it runs a stage, and the runner may be killed before it can put them back."""
    figure, copy = (here.root / folder / f"{clones.NOTEBOOK}.png" for folder in ("figures", "build/published"))

    def fail(arguments: list[str]) -> int:
        figure.unlink()
        return 255

    for path in (figure, copy):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"old")
    monkeypatch.setattr("dvc.cli.main", fail)
    try:
        assert cli.main(["repro"]) == 1
        assert figure.exists() or "git" not in capsys.readouterr().err
    finally:
        figure.unlink(missing_ok=True)
        copy.unlink()


def test_scoreboard_marks_smoke(here: clones.Clone, capsys: pytest.CaptureFixture[str]) -> None:
    check = claims.Check(
        sentence="A1",
        name="c",
        statement="it is so",
        role="trained",
        unit="nats",
        estimate=stats.deterministic(1.5),
        criterion=claims.Criterion(above=0),
        outcome="holds",
    )
    figures = here.root / "figures"
    figures.mkdir(exist_ok=True)
    written = []
    try:
        for scale, expected in (("smoke", "supported (smoke: not meaningful)"), ("cpu", "supported")):
            record = claims.Record(
                claim=clones.NOTEBOOK,
                title="t",
                statement="s",
                scale=scale,
                verdict="supported",
                because="1 of 1 checks hold",
                key="c",
                checks=(check,),
                published=(),
                arms={},
                provenance={},
            )
            written.append(claims.write(record, figures))
            assert cli.main(["scoreboard"]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert lines[0].split(maxsplit=1) == [clones.NOTEBOOK, expected]
            assert "it is so: 1.5 [1.5, 1.5] (n=1) nats" in lines[1]
            assert "1 of 1 checks hold" in lines[2]
            assert str(paths.FIGURES / "README.md") in lines[-1]
    finally:
        for path in written:
            path.unlink(missing_ok=True)


# --- setup ----------------------------------------------------------------------------------------


def test_setup_without_git(here: clones.Clone) -> None:
    local = here.root / ".dvc" / "config.local"
    local.unlink(missing_ok=True)
    assert cli.main(["setup"]) == 0
    first = local.read_bytes()
    assert cli.main(["setup"]) == 0
    assert local.read_bytes() == first
    assert here.dvc("config", "core.no_scm").stdout.strip() == "true"


def test_setup_without_git_keeps_the_users_settings(here: clones.Clone) -> None:
    """config.local is where DVC users put their cache folder and their remotes' passwords."""
    local = here.root / ".dvc" / "config.local"
    before = local.read_text()
    local.write_text("[cache]\n    dir = /large/disk/cache\n")
    try:
        assert cli.main(["setup"]) == 0
        assert here.dvc("config", "core.no_scm").stdout.strip() == "true"
        assert here.dvc("config", "cache.dir").stdout.strip() == "/large/disk/cache"
    finally:
        local.write_text(before)


@pytest.mark.parametrize("as_file", [False, True], ids=["clone", "worktree"])
def test_setup_in_a_git_checkout_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_file: bool
) -> None:
    """In a git worktree `.git` is a file."""
    clones.redirect(monkeypatch, tmp_path)
    (tmp_path / ".dvc").mkdir()
    if as_file:
        (tmp_path / ".git").write_text("gitdir: /elsewhere\n")
    else:
        (tmp_path / ".git").mkdir()
    assert cli.main(["setup"]) == 0
    assert not (tmp_path / ".dvc" / "config.local").exists()


# --- the command itself ---------------------------------------------------------------------------


def test_as_a_process(here: clones.Clone, tmp_path: Path) -> None:
    """The exit code reaches the shell, and nothing else is said: no traceback, no warning of a library."""
    done = here.reslab("run", "02_unknown", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("reslab: no notebook '02_unknown'; ")
    assert done.stderr.count("\n") == 1


def test_command_is_installed() -> None:
    script = Path(sys.executable).with_name("reslab")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    for verb in ("repro", "run", "clean", "report", "scoreboard", "setup", "bench"):
        assert verb in done.stdout
