"""What several test modules share: settings, a small text, a tiny run, a folder for run records.

The session's processes share a new folder for run records, so that it depends on no earlier run and leaves none behind.
"""

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

from reslab import params, paths
from reslab.data import VOCABULARY, CorpusConfig, TextConfig
from reslab.models.decoder import DecoderConfig
from reslab.training import Device, Optimisation, RunConfig

WORDS = ("alpha", "beta", "gamma", "delta", "lambda", "omega")


OWNER = "PYTEST_XDIST_WORKER" not in os.environ
"""Whether this is the process that starts the others."""


def pytest_configure() -> None:
    if OWNER:
        os.environ["RESLAB_RUNS"] = tempfile.mkdtemp(prefix="reslab-runs-")
    paths.RUNS = Path(os.environ["RESLAB_RUNS"])


def pytest_unconfigure() -> None:
    if OWNER:
        shutil.rmtree(paths.RUNS, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _presets_composed_once() -> Iterator[None]:
    """Composing one takes most of a second, and hundreds of tests do."""
    compose = functools.cache(lambda conf, scale: original(scale))
    original = params._compose
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(params, "_compose", lambda scale: deepcopy(compose(paths.CONF, scale)))
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that run records go to."""
    folder = tmp_path / "runs"
    monkeypatch.setattr(paths, "RUNS", folder)
    return folder


@pytest.fixture
def smoke() -> params.Params:
    return params.preset("smoke")


@pytest.fixture
def small_text(tmp_path: Path) -> TextConfig:
    """Lines of six Greek letters' names in random order, about 40 kB."""
    lines = np.random.default_rng(0).choice(WORDS, (1000, 7))
    path = tmp_path / "small.txt"
    path.write_text("\n".join(" ".join(line) for line in lines))
    return TextConfig(corpus=CorpusConfig(source=str(path)), context=16, evaluation_windows=40)


@pytest.fixture
def tiny(small_text: TextConfig) -> RunConfig:
    """Six steps of a decoder of two blocks: some hundredths of a second."""
    return RunConfig(
        task=small_text,
        model=DecoderConfig(vocabulary=VOCABULARY, width=16, heads=2, context=16, depth=2, init_std=0.1),
        optimisation=Optimisation(
            batch=4, steps=6, warmup=0.1, final_rate=0.1, weight_decay=0.1, beta1=0.9, beta2=0.95, clip=1.0
        ),
        learning_rate=1e-2,
        seed=0,
        device=Device(),
    )
