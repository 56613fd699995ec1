"""What claim 09 measures at initial weights: loss, variance, first updates and dead parts; all in float64.

Letters: L blocks, B sequences, T tokens, d width, H heads, V vocabulary, s standard deviation of the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from reslab import data
from reslab.experiments.runs import require_depths
from reslab.models.attention import Attention
from reslab.models.decoder import DecoderConfig
from reslab.models.initialisation import WeightInit, stream_writers
from reslab.models.layers import Mlp
from reslab.probes import evaluating, stream_places, streams
from reslab.schema import Settings
from reslab.stats import Estimate, mean_of, slope
from reslab.training import Model, build, loss_of

__all__ = [
    "INITS",
    "Exact",
    "Init",
    "adam_update",
    "dead_units",
    "exact_estimates",
    "predicted_loss",
    "saturated_rows",
    "start",
]

HEADS = 4
SEQUENCES = 4
SATURATED = 0.99
"""A row of attention is saturated where one token has this much of the weight: softmax then passes next to nothing."""
INACTIVE = -3.0
"""Below this input GELU's slope is under 0.012 in size: the unit neither speaks nor learns."""

Norm = str
NORMS: dict[Norm, bool] = {"norm": True, "bare": False}
"""With the norm before the head, and without, by their part of a check's name."""


class Exact(Settings):
    """Size of what is computed at initial weights."""

    depths: tuple[int, ...]
    """Blocks, increasing: the first is what counts as shallow, the last as deep."""
    seeds: int = Field(ge=1)
    tokens: int = Field(ge=2)
    width: int = Field(ge=HEADS, multiple_of=HEADS)
    rate: float = Field(gt=0)
    """Learning rate of AdamW's first step."""

    _depths_increase = field_validator("depths")(require_depths)


class Init(NamedTuple):
    """How the matrices start."""

    std: Callable[[int], float]
    """Of all matrices, by the width."""
    weight_init: WeightInit


def _gpt2(width: int) -> float:
    return 0.55 / width**0.5


INITS: dict[str, Init] = {
    "0.02": Init(lambda width: 0.02, "plain"),
    "0.02 scaled": Init(lambda width: 0.02, "depth_scaled"),
    "0.2": Init(lambda width: 0.2, "plain"),
    "0.2 scaled": Init(lambda width: 0.2, "depth_scaled"),
    "GPT-2's": Init(_gpt2, "plain"),
    "GPT-2's scaled": Init(_gpt2, "depth_scaled"),
    "ten times": Init(lambda width: 10 * _gpt2(width), "plain"),
}
"""`scaled`: what writes to the stream has 1/sqrt(2L) of it. GPT-2's 0.02 at width 768 is 0.55/sqrt(d); ten times it is
what 0.2 is at that width."""


def predicted_loss(vocabulary: int, width: int, std: float) -> float:
    """ln V + d s^2 / 2: the mean loss at the start behind a final norm, of logits that are normal with variance d s^2.

    The logarithm of a sum of V log-normal values; too high where d s^2 is near 2 ln V or above.
    """
    return math.log(vocabulary) + width * std**2 / 2


# --- dead parts -----------------------------------------------------------------------------------


@contextmanager
def _outputs(modules: list[nn.Linear]) -> Iterator[list[Tensor]]:
    """Collects what `modules` put out, in the order they run."""
    seen: list[Tensor] = []
    handles = [module.register_forward_hook(lambda _m, _i, out: seen.append(out.detach())) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def saturated_rows(packed: Tensor, heads: int) -> float:
    """Share of attention rows that give one token more than 0.99 of the weight, of queries, keys and values packed
    as [B, T, 3d]; causal, without the first row, which has only itself to look at."""
    query, key, _ = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in packed.chunk(3, dim=-1))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    largest = scores.masked_fill(future, -math.inf).softmax(-1).amax(-1)[..., 1:]
    return float((largest > SATURATED).double().mean())


def dead_units(inputs: Tensor) -> float:
    """Share of MLP units whose input, of [B, T, units], is below -3 for every token."""
    return float((inputs < INACTIVE).flatten(0, -2).all(0).double().mean())


# --- the start of one decoder ---------------------------------------------------------------------


def _model(exact: Exact, init: str, depth: int, final_norm: bool, seed: int) -> Model:
    config = DecoderConfig(
        width=exact.width,
        heads=HEADS,
        context=exact.tokens,
        vocabulary=data.VOCABULARY,
        depth=depth,
        init_std=INITS[init].std(exact.width),
        weight_init=INITS[init].weight_init,
        final_norm=final_norm,
    )
    return build(config, seed).double()


def _tokens(exact: Exact, seed: int) -> tuple[Tensor, Tensor]:
    shape = (SEQUENCES, exact.tokens + 1)
    drawn = torch.from_numpy(np.random.default_rng(seed).integers(0, data.VOCABULARY, shape))
    return drawn[:, :-1], drawn[:, 1:]


def adam_update(model: nn.Module, tokens: Tensor, targets: Tensor, rate: float) -> dict[str, float]:
    """What AdamW's first step does, without decay; changes `model`.

    `gradient` is the norm of the whole gradient (times the rate: the length of SGD's first step), `largest_step` the
    largest change of a weight over the rate, `function` the root mean square change of the log-probabilities in nats.
    """
    outputs = model(tokens)
    before = outputs.detach().log_softmax(-1)
    loss_of(outputs, targets).backward()
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0).step()
    moved = [float((p.detach() - old).abs().max()) for p, old in zip(model.parameters(), kept, strict=True)]
    with torch.no_grad():
        change = model(tokens).log_softmax(-1) - before
    return {
        "gradient": float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt()),
        "largest_step": max(moved) / rate,
        "function": float(change.square().mean().sqrt()),
    }


def _first_look(model: Model, tokens: Tensor, targets: Tensor) -> dict[str, float]:
    """Loss, variances and dead parts at the weights as they are."""
    modules = list(model.modules())
    packed = [m.query_key_value for m in modules if isinstance(m, Attention)]
    ups = [m.up for m in modules if isinstance(m, Mlp)]
    writers = [w for m in modules for w in ([m.project] if isinstance(m, Attention) else [])]
    writers += [m.down for m in modules if isinstance(m, Mlp)]
    places = stream_places(model)
    with (
        torch.no_grad(),
        evaluating(model),
        streams([places[0], places[-1]]) as seen,
        _outputs(packed) as keys,
        _outputs(ups) as inputs,
        _outputs(writers) as updates,
    ):
        loss = float(loss_of(model(tokens), targets))
    return {
        "loss": loss,
        "written": float((seen[-1] - seen[0]).square().mean()),
        "stream": float(seen[-1].square().mean()),
        "branches": float(sum(update.square().mean() for update in updates)),
        "saturated": float(np.mean([saturated_rows(k, HEADS) for k in keys])),
        "dead": float(np.mean([dead_units(u) for u in inputs])),
    }


def start(exact: Exact) -> pd.DataFrame:
    """Every init at every depth, with the final norm and without; one row each and seed.

    `written` is the mean square of what the branches added to the stream, `branches` the sum of their mean squares,
    `writers` the standard deviation of the matrices that write, over s; see `adam_update` for the first updates.
    """
    rows: list[dict[str, object]] = []
    for seed in range(exact.seeds):
        tokens, targets = _tokens(exact, seed)
        for depth in exact.depths:
            for init in INITS:
                for norm, final_norm in NORMS.items():
                    model = _model(exact, init, depth, final_norm, seed)
                    writers = torch.cat([w.detach().flatten() for w in stream_writers(model)])
                    rows.append(
                        {
                            "init": init,
                            "norm": norm,
                            "depth": depth,
                            "seed": seed,
                            "writers": float(writers.std()) / INITS[init].std(exact.width),
                            **_first_look(model, tokens, targets),
                            **adam_update(model, tokens, targets, exact.rate),
                        }
                    )
    return pd.DataFrame(rows)


# --- estimates ------------------------------------------------------------------------------------


class _Table:
    """Values seed by seed out of `start`."""

    def __init__(self, exact: Exact, table: pd.DataFrame) -> None:
        self.exact, self.table = exact, table
        self.shallow, self.deep = exact.depths[0], exact.depths[-1]

    def values(self, column: str, init: str, depth: int, norm: Norm = "norm") -> np.ndarray:
        t = self.table
        chosen = t[(t["init"] == init) & (t["depth"] == depth) & (t["norm"] == norm)]
        found: np.ndarray = chosen.sort_values("seed")[column].to_numpy(dtype=float)
        return found

    def exponent(self, init: str) -> Estimate:
        """Of the written variance as a power of the depth."""
        by_depth = np.log([self.values("written", init, depth) for depth in self.exact.depths])
        return mean_of([slope(np.log(self.exact.depths).tolist(), seed.tolist()) for seed in by_depth.T])

    def loss(self, norm: Norm, large: str, small: str) -> dict[str, Estimate]:
        deep, shallow = (self.values("loss", large, depth, norm) for depth in (self.deep, self.shallow))
        return {
            "shallow": mean_of((shallow - self.values("loss", small, self.shallow, norm)).tolist()),
            "deep": mean_of((deep - self.values("loss", small, self.deep, norm)).tolist()),
            "depth": mean_of((deep - shallow).tolist()),
        }

    def updates(self, column: str, norm: Norm, large: str, small: str) -> dict[str, Estimate]:
        """log10 of ratios: large init to small in the deepest, and deepest to shallowest at the large."""
        deep = np.log10(self.values(column, large, self.deep, norm))
        other = np.log10(self.values(column, small, self.deep, norm))
        shallow = np.log10(self.values(column, large, self.shallow, norm))
        return {"deep": mean_of((deep - other).tolist()), "depth": mean_of((deep - shallow).tolist())}


def exact_estimates(exact: Exact, table: pd.DataFrame) -> dict[str, Estimate]:
    """The estimates of all exact checks, by name."""
    t = _Table(exact, table)
    sublayers = 2 * t.deep
    ratio = t.values("branches", "GPT-2's", t.deep) / t.values("branches", "GPT-2's scaled", t.deep)
    expected = predicted_loss(data.VOCABULARY, exact.width, 0.2)
    found = {
        "writers_std": mean_of((t.values("writers", "0.02 scaled", t.deep) * sublayers**0.5).tolist()),
        "branch_ratio": mean_of((ratio / sublayers).tolist()),
        "exponent_plain": t.exponent("GPT-2's"),
        "exponent_scaled": t.exponent("GPT-2's scaled"),
        "exponent_small": t.exponent("0.02 scaled"),
        "exponent_large": t.exponent("0.2 scaled"),
        "predicted_loss": mean_of((t.values("loss", "0.2", t.deep) / expected).tolist()),
        "adam_step": mean_of(table.groupby("seed")["largest_step"].mean().tolist()),
    }
    for norm in NORMS:
        found |= {f"loss_{what}_{norm}": e for what, e in t.loss(norm, "0.2", "0.02").items()}
        found[f"loss_depth_wide_{norm}"] = t.loss(norm, "ten times", "GPT-2's")["depth"]
        for column, name in (("gradient", "sgd"), ("function", "adam")):
            found |= {f"{name}_{what}_{norm}": e for what, e in t.updates(column, norm, "0.2", "0.02").items()}
    for init, suffix in (("0.2", ""), ("ten times", "_wide")):
        for what in ("saturated", "dead"):
            found[f"{what}{suffix}"] = mean_of(t.values(what, init, t.deep).tolist())
    return found
