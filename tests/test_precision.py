"""Rounding, absorption and accumulation, against values worked out by hand, PyTorch's casts and float64."""

import math

import pytest
import torch
from torch import Tensor

from reslab.precision import (
    FORMATS,
    absorbed,
    absorbed_by_law,
    absorbed_probability,
    accumulate,
    accumulated_error,
    add,
    format_of,
    neighbour_gap,
    relative_accumulated_error,
    round_stochastic,
    round_to,
    ulp,
)
from reslab.schema import UserError

LOW = ("fp16", "bf16", "e4m3", "e5m2")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of_all_sizes(name: str, count: int = 20_000) -> Tensor:
    """float32 numbers from below the format's smallest to just below its largest, and what is at its edges."""
    form = FORMATS[name]
    lowest = max(form.lowest_exponent - form.bits - 2, -140)
    exponents = torch.empty(count).uniform_(lowest, math.log2(form.largest) - 0.01, generator=generator())
    signs = torch.where(torch.rand(count, generator=generator(1)) < 0.5, -1.0, 1.0)
    edges = torch.tensor([0.0, 1.0, -1.0, 2.0**form.lowest_exponent, form.largest])
    return torch.cat([signs * 2.0**exponents, edges])


# --- formats and spacing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bits", "lowest", "largest"),
    [
        ("fp32", 24, -126, 2.0**128 - 2.0**104),
        ("fp16", 11, -14, 65504.0),
        ("bf16", 8, -126, 2.0**128 - 2.0**120),
        ("e4m3", 4, -6, 448.0),
        ("e5m2", 3, -14, 57344.0),
    ],
)
def test_formats_are_as_published(name: str, bits: int, lowest: int, largest: float) -> None:
    form = FORMATS[name]
    assert (form.bits, form.lowest_exponent, form.largest) == (bits, lowest, largest)
    assert format_of(form.dtype) is form


def test_dtype_without_a_format_is_refused() -> None:
    with pytest.raises(UserError, match=r"no format for torch\.int8; use one of torch\.float32"):
        format_of(torch.int8)


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        (100.0, "fp16", 0.0625),
        (100.0, "bf16", 0.5),
        (100.0, "e4m3", 8.0),
        (100.0, "e5m2", 16.0),
        (-100.0, "fp16", 0.0625),
        (1.0, "fp32", 2.0**-23),
        (64.0, "fp16", 0.0625),
        (math.nextafter(64, 0), "fp16", 0.03125),
        (0.0, "fp16", 2.0**-24),
        (2.0**-20, "fp16", 2.0**-24),
        (0.0, "e4m3", 2.0**-9),
    ],
)
def test_ulp(value: float, name: str, expected: float) -> None:
    assert ulp(value, FORMATS[name]).item() == expected


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_gaps_lead_to_the_neighbours(name: str) -> None:
    form = FORMATS[name]
    values = of_all_sizes(name).to(form.dtype)
    values = values[values.isfinite() & (values.abs() < form.largest)]
    for direction in (1.0, -1.0):
        towards = torch.full_like(values, direction * math.inf)
        neighbours = torch.nextafter(values, towards).double()
        gaps = neighbour_gap(values, torch.tensor(direction), form)
        assert torch.equal(values.double() + direction * gaps, neighbours)


# --- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOW)
def test_rounding_is_pytorchs_cast_from_float32(name: str) -> None:
    form = FORMATS[name]
    beyond = torch.tensor([1e6, -1e6, math.inf, -math.inf]) if name != "bf16" else torch.tensor([math.inf, 3.4e38])
    halves = torch.arange(-512, 513) / 2 * float(ulp(form.largest, form)) / 2
    values = torch.cat([of_all_sizes(name), beyond, halves.float()])
    torch.testing.assert_close(round_to(values, form), values.to(form.dtype).double(), rtol=0, atol=0)


def test_float64_is_rounded_once() -> None:
    """Just above the middle of 100 and 100.0625; a cast through float32 falls back onto the middle, and then to 100."""
    value = torch.tensor(100.03125 + 1e-12, dtype=torch.float64)
    assert round_to(value, FORMATS["fp16"]).item() == 100.0625
    assert round_to(100.03125, FORMATS["fp16"]).item() == 100.0  # the tie goes to the even one
    assert round_to(100.09375, FORMATS["fp16"]).item() == 100.125


def test_not_a_number_stays_one() -> None:
    assert all(round_to(math.nan, form).isnan() for form in FORMATS.values())


def test_what_is_too_large_saturates_where_there_is_no_infinity() -> None:
    assert round_to(1000.0, FORMATS["e4m3"]).item() == 448
    assert round_to(-1000.0, FORMATS["e4m3"]).item() == -448
    assert round_to(65520.0, FORMATS["fp16"]).item() == math.inf
    assert round_to(65519.0, FORMATS["fp16"]).item() == 65504


def test_stochastic_rounding_is_unbiased_and_between_neighbours() -> None:
    values = torch.full((100_000,), 100.1, dtype=torch.float64)
    rounded = round_stochastic(values, FORMATS["bf16"], generator())
    assert set(rounded.tolist()) == {100.0, 100.5}
    assert float(rounded.mean()) == pytest.approx(100.1, abs=4 * 0.2 / 100_000**0.5)  # p = 0.2: std 0.5 * 0.4
    exact = torch.tensor([100.5, -64.0, 0.0], dtype=torch.float64)
    assert torch.equal(round_stochastic(exact, FORMATS["bf16"], generator()), exact)
    assert torch.equal(rounded, round_stochastic(values, FORMATS["bf16"], generator()))


# --- absorption -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "total"), [("fp16", 100.125), ("bf16", 100.0), ("e4m3", 96.0), ("e5m2", 96.0)])
def test_a_hundred_and_a_tenth(name: str, total: float) -> None:
    """In the 8-bit formats 100 itself lies in the middle of 96 and 104 (112), and goes to the even 96."""
    assert add(100.0, 0.1, FORMATS[name]).item() == total
    assert absorbed(100.0, 0.1, FORMATS[name]).item() == (name != "fp16")


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_addition_is_pytorchs(name: str) -> None:
    form = FORMATS[name]
    x, u = of_all_sizes(name).to(form.dtype), of_all_sizes(name).flip(0).to(form.dtype)
    torch.testing.assert_close(add(x, u, form), (x + u).double(), rtol=0, atol=0)


@pytest.mark.parametrize("name", LOW)
def test_the_half_ulp_law_is_exact(name: str) -> None:
    """On updates from far below to above an ulp of x, exactly half an ulp and half of the smaller gap among them."""
    form = FORMATS[name]
    x = round_to(of_all_sizes(name), form)
    x = x[x.abs() < form.largest / 4]
    for factor in (1e-3, 0.2, 0.25, 0.3, 0.49, 0.5, 0.51, 0.75, 1.0, 3.0):
        for sign in (1.0, -1.0):
            u = sign * factor * ulp(x, form)
            assert torch.equal(absorbed_by_law(x, u, form), absorbed(x, u, form))


def test_ties_go_to_even() -> None:
    form = FORMATS["fp16"]
    x = torch.tensor([100.0, 100.0625, 64.0, 64.0], dtype=torch.float64)
    u = torch.tensor([0.03125, 0.03125, -0.015625, -0.03125], dtype=torch.float64)
    assert absorbed_by_law(x, u, form).tolist() == [True, False, True, False]
    assert add(x, u, form).tolist() == [100.0, 100.125, 64.0, 63.96875]


def test_expected_share_is_the_measured_one() -> None:
    x = 100 * torch.randn(200_000, generator=generator(), dtype=torch.float64)
    u = torch.randn(200_000, generator=generator(1), dtype=torch.float64)
    for name, rms in (("fp16", 0.1), ("bf16", 0.1), ("bf16", 1.0), ("e4m3", 10.0), ("e5m2", 10.0), ("e5m2", 1.0)):
        measured = float(absorbed(x, rms * u, FORMATS[name]).double().mean())
        assert absorbed_probability(x, rms, FORMATS[name]) == pytest.approx(measured, abs=0.004), name


# --- accumulation ---------------------------------------------------------------------------------


def added(name: str, method: str, count: int = 96) -> float:
    tenths = torch.full((count, 1), 0.1, dtype=torch.float64)
    return accumulate(100.0, tenths, FORMATS[name], method, generator())[-1].item()  # type: ignore[arg-type]


def test_ninety_six_tenths_onto_a_hundred() -> None:
    assert added("bf16", "plain") == 100.0
    assert added("fp16", "plain") == 112.0
    assert added("bf16", "Kahan") == pytest.approx(109.6, abs=0.02)
    assert added("fp16", "Kahan") == pytest.approx(109.6, abs=0.003)
    assert added("bf16", "fp32") == pytest.approx(100 + 96 * float(round_to(0.1, FORMATS["bf16"])), abs=1e-3)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_accumulation_is_that_of_pytorchs_arithmetic(name: str) -> None:
    form = FORMATS[name]
    updates = 3 * torch.randn(40, 200, generator=generator())
    start = 100 * torch.randn(200, generator=generator(1))
    plain, kahan, kept = start.to(form.dtype), start.to(form.dtype), torch.zeros(200, dtype=form.dtype)
    for update in updates.to(form.dtype):
        plain = plain + update
        corrected = update - kept
        grown = kahan + corrected
        kept, kahan = (grown - kahan) - corrected, grown
    assert torch.equal(accumulate(start, updates, form)[-1], plain.double())
    assert torch.equal(accumulate(start, updates, form, "Kahan")[-1], kahan.double() - kept.double())


def test_stochastic_accumulation_is_unbiased() -> None:
    tenths = torch.full((96, 20_000), 0.1, dtype=torch.float64)
    sums = accumulate(100.0, tenths, FORMATS["bf16"], "stochastic", generator())[-1]
    u = float(round_to(0.1, FORMATS["bf16"]))
    expected = math.sqrt(96 * u / 0.5 * (1 - u / 0.5)) * 0.5
    assert float(sums.mean()) == pytest.approx(100 + 96 * u, abs=4 * expected / 20_000**0.5)
    assert float(sums.std()) == pytest.approx(expected, rel=0.05)


def test_errors_of_the_accumulated_update() -> None:
    updates = torch.full((4, 2), 0.1, dtype=torch.float64)
    swallowed = accumulate(100.0, updates, FORMATS["bf16"])
    assert accumulated_error(swallowed, updates).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert relative_accumulated_error(swallowed, updates).tolist() == pytest.approx([1.0] * 4)
    exact = torch.cat([torch.zeros(1, 2, dtype=torch.float64), updates.cumsum(0)])
    assert accumulated_error(exact, updates).tolist() == [0.0] * 4


def test_what_cannot_be_accumulated_is_refused() -> None:
    updates = torch.ones(2, 1)
    with pytest.raises(UserError, match="give generator="):
        accumulate(1.0, updates, FORMATS["fp16"], "stochastic")
    with pytest.raises(UserError, match="did you mean 'Kahan'"):
        accumulate(1.0, updates, FORMATS["fp16"], "kahan")  # type: ignore[arg-type]
