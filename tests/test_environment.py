"""environment.yml, requirements.lock and pyproject.toml ask for the same packages."""

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

from reslab import paths

LINUX = {"platform_system": "Linux", "platform_machine": "x86_64"}


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
    return table


def locked() -> dict[str, Requirement]:
    lines = (paths.ROOT / "requirements.lock").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    names = [canonicalize_name(requirement.name) for requirement in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def pinned(requirement: Requirement) -> str:
    """The one version that `requirement` allows."""
    [specifier] = requirement.specifier
    assert specifier.operator == "=="
    assert "*" not in specifier.version
    return specifier.version


def conda() -> tuple[dict[str, str], list[str]]:
    """Version specifier of each conda package, and the arguments for pip."""
    content = YAML(typ="safe", pure=True).load(paths.ROOT / "environment.yml")["dependencies"]
    packages: dict[str, str] = {}
    for entry in content:
        if isinstance(entry, str):
            name, specifier = re.fullmatch(r"([\w.-]+?)\s*((?:[=<>!~].*)?)", entry).groups()  # type: ignore[union-attr]
            packages[name] = specifier
    [pip] = [entry["pip"] for entry in content if isinstance(entry, dict)]
    return packages, pip


def test_conda_python_is_one_that_the_project_allows() -> None:
    version = conda()[0]["python"].lstrip("=")
    allowed = SpecifierSet(project()["requires-python"])
    assert re.fullmatch(r"3\.\d+", version)
    assert allowed.contains(f"{version}.0")
    assert allowed.contains(f"{version}.99")


def test_conda_installs_the_lock_and_the_project() -> None:
    assert conda()[1] == ["-r requirements.lock", "-e ."]


def test_conda_packages_have_the_versions_of_the_lock() -> None:
    for name, specifier in conda()[0].items():
        if (requirement := locked().get(canonicalize_name(name))) is not None:
            assert specifier.lstrip("=") == pinned(requirement)


@pytest.mark.parametrize("group", ["dependencies", "dev", "huggingface"])
def test_every_dependency_is_pinned_to_a_version_it_allows(group: str) -> None:
    wanted = project()["dependencies"] if group == "dependencies" else project()["optional-dependencies"][group]
    assert len(wanted) >= (1 if group == "huggingface" else 5)
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in locked(), f"{requirement} is not in requirements.lock"
        assert requirement.specifier.contains(pinned(locked()[name])), f"{requirement}: locked at {locked()[name]}"


def test_all_but_triton_is_pinned() -> None:
    for name, requirement in locked().items():
        if name != "triton":
            assert pinned(requirement)
            assert requirement.marker is None


def test_torch_is_pinned_exactly() -> None:
    assert str(locked()["torch"]) == "torch==2.13.0"


def test_triton_is_left_to_torch() -> None:
    """A CUDA build of torch pins its own triton, which a pin here would contradict."""
    triton = locked()["triton"]
    assert triton.marker is not None
    assert triton.marker.evaluate(LINUX)
    assert not triton.marker.evaluate(LINUX | {"platform_machine": "aarch64"})
    assert not triton.marker.evaluate(LINUX | {"platform_system": "Darwin"})
    operators = {specifier.operator for specifier in triton.specifier}
    assert operators
    assert operators <= {">=", ">", "<", "<=", "!="}
    assert not any(name.startswith("nvidia-") for name in locked())


def test_lock_allows_every_python_that_the_project_does() -> None:
    """No pin of the lock is for one Python alone: wheels of 3.11 and 3.12 have the same versions."""
    for version in ("3.11", "3.12"):
        assert SpecifierSet(project()["requires-python"]).contains(version)
    assert not SpecifierSet(project()["requires-python"]).contains("3.13")
    assert not any("python_version" in str(requirement.marker) for requirement in locked().values())
