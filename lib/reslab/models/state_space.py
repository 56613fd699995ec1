"""Language model whose tokens meet in a recurrence over time instead of attention.

Letters: B batch, T tokens, d width; x_t the sublayer's input, s_t the state [B, d], s_0 = 0; U, W, O matrices [d, d].
"""

import copy
import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.models.attention import KeyValueCache
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.models.initialisation import Weights
from reslab.models.layers import Mlp
from reslab.schema import UserError

__all__ = [
    "DiagonalMixer",
    "IncrementMixer",
    "Mixer",
    "StateMixer",
    "StateSpace",
    "StateSpaceConfig",
    "decaying_sum",
    "state_gradient",
]


class Mixer(nn.Module):
    """A recurrence between two linear maps, [B, T, d] -> [B, T, d]: the update at t is O s_t.

    The state is kept in float32 or more, so that small increments and slow decays are not lost.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.input_map = nn.Linear(width, width, bias=False)
        self.output_map = nn.Linear(width, width, bias=False)

    def step(self, state: Tensor, fed: Tensor) -> Tensor:
        """s_t of `state` s_{t-1} and `fed` U x_t, all [B, d]."""
        raise NotImplementedError

    def states(self, fed: Tensor) -> Tensor:
        """s_1 to s_T of `fed` U x_1 to U x_T, both [B, T, d]."""
        if not fed.shape[1]:
            return fed
        states, state = [], torch.zeros_like(fed[:, 0])
        for now in fed.unbind(1):
            state = self.step(state, now)
            states.append(state)
        return torch.stack(states, 1)

    def forward(self, x: Tensor) -> Tensor:
        fed = self.input_map(x)
        states = self.states(fed.to(torch.promote_types(fed.dtype, torch.float32)))
        out: Tensor = self.output_map(states.to(x.dtype))
        return out

    def weights_by_role(self) -> Weights:
        return {"up": [self.input_map.weight], "output": [self.output_map.weight]}


class StateMixer(Mixer):
    """s_t = tanh(W s_{t-1} + U x_t), the simple recurrent network (Elman 1990): the state is replaced at each step."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.state_map = nn.Linear(width, width, bias=False)

    def step(self, state: Tensor, fed: Tensor) -> Tensor:
        return torch.tanh(self.state_map(state.to(self.state_map.weight.dtype)) + fed)


class IncrementMixer(StateMixer):
    """s_t = s_{t-1} + rate tanh(W s_{t-1} + U x_t): a residual connection over time.

    Euler steps of a differential equation (Chang et al. 2019, arXiv 1902.09689, there with an antisymmetric W).
    With rate = 1/T the gradient over T steps is a product of T factors 1 + O(1/T), which stays of order 1.
    """

    def __init__(self, width: int, rate: float) -> None:
        super().__init__(width)
        self.rate = rate

    def step(self, state: Tensor, fed: Tensor) -> Tensor:
        return state + self.rate * super().step(state, fed)


class DiagonalMixer(Mixer):
    """s_t = a * s_{t-1} + sqrt(1 - a^2) * U x_t with learnt decays a in (0, 1)^d: a linear, diagonal state space.

    Diagonal as S4D (Gu et al. 2022, arXiv 2206.11893), here with real decays; the factor on the input keeps the
    variance of a white one, as in the LRU (Orvieto et al. 2023, arXiv 2303.06349, section 3.4). a is the sigmoid of
    `decay_logit` [d] and starts at e^(-1/tau), time constants tau spread geometrically from 1 to `slowest` tokens.
    """

    def __init__(self, width: int, slowest: int) -> None:
        super().__init__(width)
        self.slowest = slowest
        self.decay_logit = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the decays anew; nothing is drawn."""
        exponents = torch.linspace(0, math.log(self.slowest), self.width, dtype=torch.float64)
        with torch.no_grad():  # the logit of e^(-1/tau)
            self.decay_logit.copy_(-(-exponents).exp().expm1().log())

    def decays(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """a and sqrt(1 - a^2), both [d]; without cancellation where a is near 1."""
        logit = self.decay_logit.to(dtype)
        decay = logit.sigmoid()
        return decay, ((-logit).sigmoid() * (1 + decay)).sqrt()

    def step(self, state: Tensor, fed: Tensor) -> Tensor:
        decay, scale = self.decays(fed.dtype)
        return decay * state + scale * fed

    def states(self, fed: Tensor) -> Tensor:
        decay, scale = self.decays(fed.dtype)
        return decaying_sum(scale * fed, decay)


def decaying_sum(x: Tensor, decay: Tensor) -> Tensor:
    """sum_{s<=t} a^(t-s) x_s for all t at once; x and the sum [B, T, d], a = `decay` [d] in (0, 1).

    By doubling (Hillis & Steele 1986): after round k each sum reaches 2^k steps back. No power of a exceeds 1, so
    nothing overflows at any T.
    """
    reach = 1
    while reach < x.shape[1]:
        x = x + decay * F.pad(x[:, :-reach], (0, 0, reach, 0))
        reach, decay = 2 * reach, decay * decay
    return x


def state_gradient(mixer: Mixer, inputs: Tensor) -> float:
    """||d s_T / d s_0||_F / sqrt(d) of a mixer that is fed x_1 to x_T, `inputs` [T, d], from s_0 = 0.

    Exact, in float64: one backward pass through all steps. 1 for s_t = s_{t-1}; ((a^2T).mean())^(1/2) for decays a.
    """
    exact, width = copy.deepcopy(mixer).double(), mixer.width
    start = torch.zeros(width, width, dtype=torch.float64, device=inputs.device, requires_grad=True)
    state = start  # d copies; the i-th one's gradient is that of the i-th coordinate of s_T
    for fed in exact.input_map(inputs.double()):
        state = exact.step(state, fed)
    (jacobian,) = torch.autograd.grad(state.trace(), start)
    largest = jacobian.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float(largest * (jacobian / largest).norm()) / math.sqrt(width)  # squares of tiny entries would be 0


class StateSpaceConfig(DecoderConfig):
    """A decoder whose attention is replaced by a recurrence."""

    kind: Literal["state_space"] = "state_space"  # type: ignore[assignment]
    has_attention = False
    heads: Literal[1] = 1
    """There are none to choose."""
    mixer: Literal["state", "increment", "diagonal"]
    rate: float | None = Field(default=None, gt=0)
    """Of mixer `increment`; None is 1/context."""

    @model_validator(mode="after")
    def _rate_has_a_use(self) -> "StateSpaceConfig":
        if self.rate is not None and self.mixer != "increment":
            raise ValueError(f"rate is for mixer: increment; remove it with mixer: {self.mixer}")
        return self

    @property
    def relative_cost(self) -> float:
        """Multiplications per example and block, for planning."""
        return self.context * self.width**2 * (10 if self.mixer == "diagonal" else 11)

    def make_mixer(self) -> nn.Module:
        """The sublayer in which tokens meet."""
        if self.mixer == "state":
            return StateMixer(self.width)
        if self.mixer == "increment":
            return IncrementMixer(self.width, 1 / self.context if self.rate is None else self.rate)
        return DiagonalMixer(self.width, self.context)


class StateSpace(Decoder):
    """Token ids [B, T] -> logits [B, T, V], by recurrence and MLP sublayers."""

    def __init__(self, config: StateSpaceConfig) -> None:
        super().__init__(config)

    def _branches(self, config: DecoderConfig) -> Mapping[str, nn.Module]:
        assert isinstance(config, StateSpaceConfig)
        return {"mixer": config.make_mixer(), "mlp": Mlp(config.width)}

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for module in self.modules():
            if isinstance(module, DiagonalMixer):
                module.reset_parameters()  # draws nothing, so it may come after the connections

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        if cache is not None:
            raise UserError("a recurrence has no keys and values to cache; call the model on the whole sequence")
        return super().forward(tokens)

    def new_cache(self) -> None:
        """None: each generated token runs the recurrence from the start."""
