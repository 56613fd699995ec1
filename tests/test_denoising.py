"""Noise, estimates and samplers, against values worked out by hand and in float64."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from reslab import data
from reslab.denoising import LinearDenoiser, add_noise, clean_estimate, predictor, structure
from reslab.models.unet import UNetConfig
from reslab.readout import readable_share
from reslab.sampling import denoise, timetable
from reslab.schema import UserError
from reslab.training import build


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- noise and estimate ---------------------------------------------------------------------------


def test_noise_is_added_as_the_task_does() -> None:
    task = data.load(data.NoisyDigitsConfig(labels=False))
    assert isinstance(task, data.NoisyDigits)
    (inputs, noise), *_ = task.held_out("test")
    noisy, times = inputs
    (clean, _), *_ = task.digits.held_out("test")
    for i in (0, 1, 2):
        expected = add_noise(clean[i : i + 1], noise[i : i + 1], float(times[i]))
        torch.testing.assert_close(expected, noisy[i : i + 1])


def test_true_noise_gives_the_clean_picture() -> None:
    clean, noise = draw(2, 1, 8, 8), draw(2, 1, 8, 8, seed=1)
    torch.testing.assert_close(clean_estimate(add_noise(clean, noise, 0.7), noise, 0.7), clean)
    half = add_noise(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0.5)
    assert half.item() == pytest.approx(0.5**0.5)


@pytest.mark.parametrize("time", [0.0, 1.0, -0.5])
def test_times_at_the_ends_are_refused(time: float) -> None:
    with pytest.raises(UserError, match="must lie between 0"):
        add_noise(draw(1, 1, 2, 2), draw(1, 1, 2, 2), time)


def test_structure_by_hand() -> None:
    mean = torch.tensor([[[1.0, 1.0]]])
    clean = torch.tensor([[[[2.0, 1.0]]]] * 4)
    estimate = torch.tensor([[[[3.0, 1.0]]], [[[0.0, 1.0]]], [[[2.0, 2.0]]], [[[1.0, 1.0]]]])
    assert structure(estimate, clean, mean).tolist() == pytest.approx([1, -1, 0.5**0.5, 0])


def test_linear_denoiser_is_the_posterior_mean_of_a_gaussian() -> None:
    """Against the textbook's formula, and no other linear map does better on the pictures it was made from."""
    pictures = draw(50, 1, 2, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.3]], dtype=torch.float64) + 0.2
    flat = pictures.flatten(1).numpy()
    mean, covariance = flat.mean(0), np.cov(flat.T, bias=True)
    a, s = math.cos(math.pi / 2 * 0.3), math.sin(math.pi / 2 * 0.3)
    noisy = draw(3, 1, 2, 2, seed=1)
    inverse = np.linalg.inv(a**2 * covariance + s**2 * np.eye(4))
    expected = s * (noisy.flatten(1).numpy() - a * mean) @ inverse
    found = LinearDenoiser(pictures)(noisy, 0.3)
    np.testing.assert_allclose(found.flatten(1).numpy(), expected, rtol=1e-10)
    assert found.shape == noisy.shape


def test_linear_denoiser_of_one_picture_knows_the_noise() -> None:
    """With no variance in the pictures all that differs from their mean is noise."""
    clean, noise = draw(1, 1, 2, 2), draw(1, 1, 2, 2, seed=1)
    linear = LinearDenoiser(clean.expand(5, -1, -1, -1))
    torch.testing.assert_close(linear(add_noise(clean, noise, 0.4), 0.4), noise)


def test_predictor_leaves_the_mode_and_gives_the_pictures_dtype() -> None:
    model = build(UNetConfig(channels=4, depth=1), 0).train()
    out = predictor(model)(draw(2, 1, 8, 8), 0.5)
    assert out.dtype == torch.float64
    assert not out.requires_grad
    assert model.training


# --- sampling -------------------------------------------------------------------------------------


def perfect(clean: Tensor):  # type: ignore[no-untyped-def]
    """Predicts the noise that is in x_t if the picture is `clean`."""

    def predict(noisy: Tensor, time: float) -> Tensor:
        a, s = math.cos(math.pi / 2 * time), math.sin(math.pi / 2 * time)
        return (noisy - a * clean) / s

    return predict


def test_timetable() -> None:
    assert timetable(0.8, 4) == pytest.approx([0.8, 0.6, 0.4, 0.2, 0])
    assert timetable(0.8, 1)[-1] == 0


@pytest.mark.parametrize(("start", "steps", "words"), [(1.0, 5, "start 1 must"), (0.0, 5, "start 0"), (0.5, 0, "0 st")])
def test_bad_timetables_are_refused(start: float, steps: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        timetable(start, steps)


def test_ddim_with_the_true_noise_stays_on_the_line_between_picture_and_noise() -> None:
    """Every state is x_t of the same picture and noise, and the last is the picture."""
    clean, noise = draw(2, 1, 4, 4).clamp(-1, 1), draw(2, 1, 4, 4, seed=1)
    times = timetable(0.9, 5)
    path = denoise(perfect(clean), add_noise(clean, noise, 0.9), times)
    assert (len(path.states), len(path.estimates)) == (6, 5)
    for state, time in zip(path.states[:-1], times[:-1], strict=True):
        torch.testing.assert_close(state, add_noise(clean, noise, time))
    torch.testing.assert_close(path.states[-1], clean)


def test_ddpm_has_the_variance_of_the_schedule() -> None:
    """With the true picture known, the state at time t is a x + s e with fresh, unit noise, whatever eta is."""
    clean = torch.zeros(2000, 1, 2, 2, dtype=torch.float64)
    times = timetable(0.9, 3)
    path = denoise(perfect(clean), add_noise(clean, draw(2000, 1, 2, 2), 0.9), times, eta=1.0, seed=3)
    for state, time in zip(path.states[:-1], times[:-1], strict=True):
        assert float(state.std()) == pytest.approx(math.sin(math.pi / 2 * time), rel=0.05)
    torch.testing.assert_close(path.states[-1], clean)


def test_ddpm_step_is_ho_et_als_posterior() -> None:
    """Variance of one step, against eq. 7 of arXiv 2006.11239: (1 - c_s) / (1 - c_t) (1 - c_t / c_s)."""
    clean = torch.zeros(4000, 1, 2, 2, dtype=torch.float64)
    noisy = torch.full_like(clean, 0.5)
    state = denoise(perfect(clean), noisy, [0.8, 0.4, 0.0], eta=1.0).states[1]
    c_t, c_s = math.cos(math.pi / 2 * 0.8) ** 2, math.cos(math.pi / 2 * 0.4) ** 2
    assert float(state.var()) == pytest.approx((1 - c_s) / (1 - c_t) * (1 - c_t / c_s), rel=0.03)
    weight = math.sqrt(c_t / c_s) * (1 - c_s) / (1 - c_t)  # of x_t in the posterior's mean
    assert float(state.mean()) == pytest.approx(0.5 * weight, abs=0.03)


def test_sampler_depends_on_its_seed_alone() -> None:
    clean, noisy = torch.zeros(1, 1, 2, 2, dtype=torch.float64), draw(1, 1, 2, 2)
    times = [0.8, 0.4, 0.2, 0.0]
    first, same, other = (denoise(perfect(clean), noisy, times, eta=1.0, seed=s).states[2] for s in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_estimates_stay_within_the_limits() -> None:
    path = denoise(lambda noisy, time: -5 * torch.ones_like(noisy), draw(1, 1, 2, 2), timetable(0.9, 3))
    assert all(estimate.abs().max() <= 1 for estimate in path.estimates)
    with pytest.raises(UserError, match="eta 2 must lie"):
        denoise(perfect(draw(1, 1, 2, 2)), draw(1, 1, 2, 2), [0.5, 0.0], eta=2.0)


# --- reading off ----------------------------------------------------------------------------------


def test_readable_share_is_one_for_a_linear_map_and_none_for_noise() -> None:
    x, other = draw(400, 6).numpy(), draw(400, 2, seed=1).numpy()
    y = x[:, :2] * 3 + 1
    assert readable_share(x[:200], y[:200], x[200:], y[200:]) == pytest.approx(1, abs=1e-4)
    assert readable_share(x[:200], other[:200], x[200:], other[200:]) < 0.05


def test_readable_share_does_not_depend_on_the_unit() -> None:
    x, y = draw(100, 3).numpy(), draw(100, 1, seed=1).numpy()
    y = y + x[:, :1]
    found = [readable_share(c * x[:50], y[:50], c * x[50:], y[50:]) for c in (1.0, 1e-6, 1e6)]
    assert found == pytest.approx([found[0]] * 3)


def test_a_small_difference_between_equal_rows_is_hardly_readable() -> None:
    """At the resolution, 3 % of the features' size, half of the target is left; far below it, nothing is read."""
    signal = draw(4000, 1).numpy()
    signal /= signal.std()
    for size, share in ((3e-1, 0.99), (3e-2, 0.75), (3e-4, 0.0)):
        x = 1 + size * signal
        assert readable_share(x, signal, x, signal) == pytest.approx(share, abs=0.02)


def test_readable_share_of_what_is_not_finite_is_not_a_number() -> None:
    x, y = draw(10, 2).numpy(), draw(10, 1).numpy()
    assert math.isnan(readable_share(x * np.inf, y, x, y))
    assert math.isnan(readable_share(x, y, x * np.nan, y))
    assert readable_share(0 * x, y, 0 * x, y) == pytest.approx(0, abs=1e-9)
