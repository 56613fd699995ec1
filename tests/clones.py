"""Small copies of the project in temporary folders, to run the pipeline in without touching the project itself."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import psutil
import pytest
from nbformat import v4
from ruamel.yaml import YAML

from reslab import paths, workspace

NOTEBOOK = "01_no_residual_collapse"
FOREIGN = ("GIT_", "DVC_", "RESLAB_", "MAKE", "MFLAGS", "PYTEST_")
"""Prefixes of variables that would tie a clone to whatever runs the tests."""


@dataclass(frozen=True)
class Clone:
    """A copy of the project, and the environment in which its own code trains into its own run records."""

    root: Path
    environment: dict[str, str]

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def start(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start `command` in a session of its own, as from another terminal; output goes to the file `log`."""
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=self.root,
                env=self.environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        return self.root.with_name(f"{self.root.name}.log")

    def call(self, *command: str, cwd: Path | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run `command` to its end. Nothing of it is left when it takes too long."""
        try:
            return subprocess.run(
                command,
                cwd=cwd or self.root,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        finally:
            self.end()

    def reslab(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self.call(sys.executable, "-m", "reslab", *arguments, cwd=cwd)

    def dvc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.call("dvc", *arguments)

    def git(self, *arguments: str) -> str:
        done = self.call("git", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "state")

    def processes(self) -> list[psutil.Process]:
        """The living processes that work in this clone, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                here = process.environ().get("RESLAB_RUNS") == str(self.runs)
                here = here or any(str(self.root) in word for word in process.cmdline())
                if here and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def left_after(self, seconds: float) -> list[str]:
        """The processes still alive after at most `seconds`, as text for the failing test's message."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        described = []
        for process in left:
            with suppress(psutil.Error):
                described.append(f"{process.pid}: {' '.join(process.cmdline())[:120]}")
        return described

    def end(self) -> None:
        """Kill what is left of this clone."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()

    def change(self, name: str, value: object) -> None:
        """Set the parameter `name`, such as optimisation.steps, in params.yaml; None takes it out."""
        path = self.root / "params.yaml"
        content: Any = YAML(typ="safe", pure=True).load(path)
        *sections, last = name.split(".")
        section = content
        for part in sections:
            section = section[part]
        if value is None:
            del section[last]
        else:
            section[last] = value
        YAML(typ="safe", pure=True).dump(content, path)


def clone(root: Path, *, git: bool, every_claim: bool = False) -> Clone:
    """A clone at smoke scale in `root`, which must not exist: from git with one commit, or like an unpacked tarball.

    Its pipeline has the claim NOTEBOOK alone, so that it is short, unless every claim is asked for.
    """
    root.mkdir(parents=True)
    if git:
        _in_git(root, "init", "--quiet", "--initial-branch=main")
        _in_git(root, "config", "user.name", "tests")
        _in_git(root, "config", "user.email", "tests@localhost")
    created = workspace.create(root, "smoke")
    if not every_claim:
        _keep_one_claim(root)
    for name in (".gitignore", ".dvc/.gitignore"):
        if (paths.ROOT / name).exists():
            shutil.copy(paths.ROOT / name, root / name)
    cloned = Clone(root, _environment(root, created))
    if git:
        cloned.commit()
    return cloned


def _keep_one_claim(root: Path) -> None:
    """Take the other claims out of the pipeline; their sections stay in params.yaml."""
    for path in (root / "notebooks").glob("*.ipynb"):
        if path.stem != NOTEBOOK:
            path.unlink()
    content: Any = YAML(typ="safe", pure=True).load(root / "dvc.yaml")
    stages = content["stages"]
    stages["clean"]["foreach"] = [NOTEBOOK]
    stages["claim"]["foreach"] = {NOTEBOOK: stages["claim"]["foreach"][NOTEBOOK]}
    board = stages["scoreboard"]
    board["deps"] = [each for each in board["deps"] if not each.endswith(".json") or NOTEBOOK in each]
    YAML(typ="safe", pure=True).dump(content, root / "dvc.yaml")


def _in_git(root: Path, *arguments: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    subprocess.run(["git", "-C", str(root), *arguments], check=True, env=clean)


def _environment(root: Path, created: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in created.items() if not name.startswith(FOREIGN)}
    aside = root.with_name(f"{root.name}.aside")
    return kept | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": created["PYTHONPATH"],
        "RESLAB_RUNS": str(root / "runs"),
        "RESLAB_DATA": str(root / "data"),
        "DVC_SITE_CACHE_DIR": str(aside / "site"),
        "DVC_GLOBAL_CONFIG_DIR": str(aside / "global"),
        "DVC_SYSTEM_CONFIG_DIR": str(aside / "system"),
    }


def redirect(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Make this very process's `reslab` work in `root` instead of in the project."""
    loaded = [module for name, module in sys.modules.items() if name.split(".")[0] == "reslab"]
    moved = {"RUNS": root / "runs", "DATA": root / "data"}
    for module in loaded:
        for name, value in _paths_of(module).items():
            inside = value.is_relative_to(paths.ROOT)
            target = root / value.relative_to(paths.ROOT) if inside else moved.get(name)
            if target is not None:
                moved[f"{module.__name__}.{name}"] = target
                monkeypatch.setattr(module, name, target) if module is not paths else None
    for name in _paths_of(paths):
        monkeypatch.setattr(paths, name, moved.get(name) or moved[f"reslab.paths.{name}"])


def _paths_of(module: ModuleType) -> dict[str, Path]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Path)}


def write_notebook(path: Path, cells: Mapping[str, str], kernel: str = "python3") -> None:
    """Write a notebook of code cells by id; the cell `parameters` gets the tag of that name."""
    made: list[Any] = []
    for name, source in cells.items():
        tags = {"tags": ["parameters"]} if name == "parameters" else {}
        made.append(v4.new_code_cell(source, id=name, metadata=tags))
    specification = {"name": kernel, "display_name": kernel, "language": "python"}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(v4.new_notebook(cells=made, metadata={"kernelspec": specification}), path)


def wait_for(path: Path, seconds: float, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until `path` exists; the test fails when it does not within `seconds`, or when `process` has ended before."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, f"ended with {process.returncode} before {path.name}: {log.read_text()}"
        assert time.monotonic() < deadline, f"no {path.name} after {seconds} s: {log.read_text()}"
        time.sleep(0.05)
