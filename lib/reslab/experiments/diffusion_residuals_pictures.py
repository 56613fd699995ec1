"""Claim 13's looks at pictures: what is left of them inside a network, in its estimate, and along a sampler's path.

All on held-out test pictures with noise that no training seed draws. Not a number where a run diverged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from reslab import data
from reslab.comparison import Runs
from reslab.denoising import LinearDenoiser, Predictor, add_noise, clean_estimate, predictor, structure
from reslab.experiments.diffusion_residuals_arms import TASK
from reslab.models.image_encoder import PatchSettings, to_patches
from reslab.probes import evaluating, outputs_of, stream_places, streams
from reslab.readout import readable_share
from reslab.sampling import Path, denoise, timetable
from reslab.sweep import trained_model
from reslab.training import ModelConfig, RunRecord, build

__all__ = ["CONTROLS", "Pictures", "linear_loss", "paths", "pictures", "readings", "samples", "structures"]

PATH_PICTURES = 100
"""Test pictures that are followed step by step."""

UNTRAINED = "untrained"
LINEAR = "best linear"
CONTROLS = (UNTRAINED, LINEAR)
"""No noise predicted, as DiT with adaLN-Zero does at its start: the noisy picture itself; and `LinearDenoiser`."""


class Pictures(NamedTuple):
    """Digits [B, 1, 8, 8], and the training pictures' mean [1, 8, 8]."""

    train: Tensor
    validation: Tensor
    test: Tensor
    mean: Tensor


def pictures(count: int = 300) -> Pictures:
    """All training pictures, and `count` of each held-out split."""
    digits = data.load(data.DigitsConfig())
    assert isinstance(digits, data.Digits)
    parts = {name: digits.images[part.start : part.stop] for name, part in digits.ranges.items()}
    return Pictures(parts["train"], parts["validation"][:count], parts["test"][:count], parts["train"].mean(0))


def _noise(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def _models(trained: Runs, device: str) -> Iterator[tuple[str, RunRecord, nn.Module | None]]:
    """Every run with its weights; None where it diverged."""
    for arm, records in trained.items():
        for record in records:
            lost = record.outcome == "diverged"
            yield arm, record, None if lost else trained_model(record.config).to(device)


# --- the estimate, by noise level -----------------------------------------------------------------


def structures(trained: Runs, times: Sequence[float], count: int, device: str) -> pd.DataFrame:
    """How much of a picture its estimate keeps, by time: columns arm, seed, time, structure, error.

    `structure` is the mean of `denoising.structure` over the test pictures, `error` the mean square error of the
    noise. The controls have a row for each time too, with seed -1: no seed enters into them.
    """
    known = pictures(count)
    rows: list[dict[str, Any]] = []

    def look(arm: str, seed: int, predict: Predictor | None) -> None:
        for number, time in enumerate(times):
            found = (np.nan, np.nan) if predict is None else _look(known, predict, number, time)
            rows.append({"arm": arm, "seed": seed, "time": time, "structure": found[0], "error": found[1]})

    for arm, record, model in _models(trained, device):
        look(arm, record.config.seed, None if model is None else predictor(model))
    look(UNTRAINED, -1, lambda noisy, time: torch.zeros_like(noisy))
    look(LINEAR, -1, LinearDenoiser(known.train))
    return pd.DataFrame(rows)


def _look(known: Pictures, predict: Predictor, number: int, time: float) -> tuple[float, float]:
    noise = _noise(known.test, number)
    noisy = add_noise(known.test, noise, time)
    predicted = predict(noisy, time)
    estimate = clean_estimate(noisy, predicted, time).clamp(-1, 1)
    kept = structure(estimate, known.test, known.mean).mean()
    return float(kept), float((predicted - noise).square().mean())


@cache
def linear_loss() -> float:
    """Test loss of the best linear predictor, on the very pictures, times and noise of the networks' test loss."""
    linear = LinearDenoiser(pictures().train)
    (inputs, noise), *_ = data.load(TASK).held_out("test")
    noisy, times = inputs
    pairs = zip(noisy, times.tolist(), noise, strict=True)
    return float(np.mean([float((linear(x[None], time)[0] - e).square().mean()) for x, time, e in pairs]))


# --- inside the network ---------------------------------------------------------------------------


def readings(
    models: Sequence[tuple[str, int, Callable[[], nn.Module] | None]], time: float, count: int, batch: int = 100
) -> pd.DataFrame:
    """How much of the network's input a linear map reads off the stream: columns arm, seed, place, share.

    `models` are (arm, seed, how to get the model), None where there is none. The input is a noisy picture at `time`;
    what is read is its deviation from the mean picture, for each token its own patch, for each pixel of a U-Net that
    pixel: what the place alone tells does not count. Places are those of `stream_places` at full resolution, the last
    is what the head's norm reads. The map is fitted on validation pictures, `share` is R^2 on test pictures.
    """
    known = pictures(count)
    rows: list[dict[str, Any]] = []
    for arm, seed, make in models:
        shares = [np.nan] if make is None else _shares(make().double(), known, time, batch)
        rows += [{"arm": arm, "seed": seed, "place": place, "share": share} for place, share in enumerate(shares)]
    return pd.DataFrame(rows)


def untrained(configs: dict[str, ModelConfig], seeds: Sequence[int]) -> list[Any]:
    """For `readings`: initial networks."""
    return [(arm, seed, lambda c=config, s=seed: build(c, s)) for arm, config in configs.items() for seed in seeds]


def trained_models(trained: Runs) -> list[Any]:
    """For `readings`: networks at the end of their runs."""
    return [
        (arm, r.config.seed, None if r.outcome == "diverged" else (lambda c=r.config: trained_model(c)))
        for arm, records in trained.items()
        for r in records
    ]


def _shares(model: nn.Module, known: Pictures, time: float, batch: int) -> list[float]:
    fit = _streams(model, known.validation, known.mean, time, 0, batch)
    test = _streams(model, known.test, known.mean, time, 1, batch)
    return [readable_share(*ours, *theirs) for ours, theirs in zip(fit, test, strict=True)]


def _streams(model: nn.Module, clean: Tensor, mean: Tensor, time: float, seed: int, batch: int) -> list[Any]:
    """Features and targets at every place of full resolution, one row a token (or pixel)."""
    noisy = add_noise(clean, _noise(clean, seed), time).double()
    seen: list[list[Tensor]] = []
    with torch.no_grad(), evaluating(model):
        for part in noisy.split(batch):
            with streams(stream_places(model)) as places:
                outputs_of(model, (part, torch.full((len(part),), time)))
            seen.append([place for place in places if place.ndim == 3 or place.shape[1] == part.shape[-1]])
    deviation = noisy - add_noise(mean, torch.zeros_like(mean), time)
    return [_rows(torch.cat(place), deviation) for place in zip(*seen, strict=True)]


def _rows(stream: Tensor, deviation: Tensor) -> tuple[Any, Any]:
    targets = to_patches(deviation, PatchSettings()) if stream.ndim == 3 else deviation.movedim(1, -1)
    return stream.flatten(0, -2).double().numpy(), targets.flatten(0, -2).double().numpy()


# --- step by step ---------------------------------------------------------------------------------


def paths(trained: Runs, start: float, steps: int, count: int, device: str) -> pd.DataFrame:
    """Test pictures made noisy and freed of noise step by step (DDIM): columns arm, seed, step, time, structure.

    `structure` is that of the picture as it is after so many steps, still noisy but at the end.
    """
    known = pictures(count)
    clean = known.test[:PATH_PICTURES]
    noisy, times = add_noise(clean, _noise(clean, 2), start), timetable(start, steps)
    rows: list[dict[str, Any]] = []
    for arm, record, model in _models(trained, device):
        states = None if model is None else denoise(predictor(model), noisy, times).states
        for step, time in enumerate(times):
            kept = np.nan if states is None else _kept(states[step], time, clean, known.mean)
            rows.append({"arm": arm, "seed": record.config.seed, "step": step, "time": time, "structure": kept})
    return pd.DataFrame(rows)


def _kept(state: Tensor, time: float, clean: Tensor, mean: Tensor) -> float:
    """Structure of x_t, whose mean picture is dimmed as x is."""
    return float(structure(state / np.cos(np.pi / 2 * time), clean, mean).mean())


def samples(trained: Runs, start: float, steps: int, count: int, device: str) -> dict[str, Path]:
    """`count` pictures out of noise alone by each arm's first run, all from the same noise; DDIM.

    An arm whose first run diverged has none.
    """
    noisy = _noise(torch.empty(count, 1, 8, 8), 3)
    first = {arm: records[:1] for arm, records in trained.items()}
    found = _models(first, device)
    times = timetable(start, steps)
    return {arm: denoise(predictor(model), noisy, times) for arm, _, model in found if model is not None}
