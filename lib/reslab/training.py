"""One run: a frozen config goes in, a record comes out; deterministic on the CPU."""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from reslab import data
from reslab.models.decoder import Decoder, DecoderConfig
from reslab.models.resnet import ResNet, ResNetConfig
from reslab.probes import stream_profile
from reslab.residuals import connection_modules, connection_rates
from reslab.schema import Settings, UserError

__all__ = [
    "Device",
    "Optimisation",
    "Outcome",
    "RunConfig",
    "RunRecord",
    "build",
    "evaluate",
    "optimisation_steps",
    "schedule",
    "train",
]

Outcome = Literal["trained", "stalled", "diverged"]
"""`stalled`: ends less than STALL_MARGIN below the best context-free guess; `diverged`: the loss is not finite."""

STALL_MARGIN = 0.05
"""Nats below the context-free loss that a run must reach to count as trained."""

SCHEMA = 1
"""Version of `RunRecord`; a record of another version is made again."""


class Device(Settings):
    """Where and in which precision a run computes. These change its numbers, so they name the run."""

    kind: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Autocast dtype; weights and optimiser state stay float32."""
    compile: bool = False
    """`torch.compile` each block; all blocks share one compilation."""
    checkpointing: bool = False
    """Keep only each block's input for the backward pass and compute the rest again: less memory, more time."""
    threads: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _low_precision_needs_cuda(self) -> "Device":
        if self.kind == "cpu" and self.precision != "float32":
            raise ValueError(f"precision {self.precision} needs kind: cuda; on the CPU use float32")
        return self

    def require(self) -> None:
        """A UserError when this machine has no such device."""
        if self.kind == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "device.kind: cuda asked for, but PyTorch finds no CUDA device; set device.kind to cpu, "
                "or install a CUDA build of torch on a machine with a GPU"
            )


class Optimisation(Settings):
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up, cosine decay and gradient clipping."""

    batch: int = Field(ge=1)
    steps: int = Field(ge=1)
    warmup: float = Field(ge=0, lt=1)
    """Fraction of the steps over which the rate rises linearly from 0."""
    final_rate: float = Field(ge=0, le=1)
    """Fraction of the peak rate that the cosine ends at."""
    weight_decay: float = Field(ge=0)
    """On the weights of linear and convolution layers only."""
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    clip: float = Field(gt=0)
    """Largest norm of the whole gradient."""


class RunConfig(Settings):
    """All that a run's numbers depend on, but for the code."""

    task: data.TextConfig | data.DigitsConfig = Field(discriminator="kind")
    model: DecoderConfig | ResNetConfig = Field(discriminator="kind")
    optimisation: Optimisation
    learning_rate: float = Field(gt=0)
    seed: int = Field(ge=0)
    device: Device


class RunRecord(Settings):
    """What a run leaves behind. Losses in nats; `None` where a run diverged before it could be measured."""

    schema_version: int = SCHEMA
    config: RunConfig
    outcome: Outcome
    parameters: int
    train_loss: tuple[float, ...]
    """Loss of each step's batch, before that step's update."""
    gradient_norm: tuple[float | None, ...]
    """Norm of the whole gradient at each step, before clipping; None where it is not finite."""
    context_free_loss: float
    validation_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    profile_before: dict[str, tuple[float | None, ...]]
    """`stream_profile` of the initial weights; None where a value is not finite."""
    profile_after: dict[str, tuple[float | None, ...]]
    """The same after training; empty where the run diverged."""


def build(config: DecoderConfig | ResNetConfig, seed: int) -> Decoder | ResNet:
    """The model at its initial weights, which depend on `config` and `seed` alone."""
    with _GENERATOR_LOCK, torch.random.fork_rng():
        model = Decoder(config) if isinstance(config, DecoderConfig) else ResNet(config)
        torch.manual_seed(seed)  # after construction, which draws more or less according to the connection
        model.reset_parameters()
    return model


_GENERATOR_LOCK = threading.Lock()
"""The global random generator is shared by the threads of a process, such as a Dask worker's."""


def schedule(config: Optimisation, step: int) -> float:
    """Fraction of the peak learning rate at `step` (from 0): linear warm-up, then cosine to `final_rate`."""
    warmup = config.warmup * config.steps
    if step < warmup:
        return (step + 1) / math.ceil(warmup)
    progress = (step - warmup) / max(1.0, config.steps - warmup)
    return config.final_rate + (1 - config.final_rate) * (1 + math.cos(math.pi * progress)) / 2


def parameter_groups(model: nn.Module, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """For an optimiser: each parameter once, by its weight decay and its learning rate.

    Weight decay for linear and convolution weights; none for embeddings, norms, scales and all of a connection.
    The learning rate is multiplied where a connection says so (`Connection.rates`).
    """
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    decayed = {id(m.weight) for m in layers if m not in connection_modules(model)}
    decayed -= {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    rates = connection_rates(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        key = (weight_decay if id(parameter) in decayed else 0.0, learning_rate * rates.get(parameter, 1.0))
        groups.setdefault(key, []).append(parameter)
    return [{"params": group, "weight_decay": decay, "lr": rate} for (decay, rate), group in groups.items()]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats of logits [..., classes] against targets [...]."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def train(config: RunConfig, report: Callable[[int, float], None] = lambda step, loss: None) -> RunRecord:
    """Run `config` to its end. `report` gets each step's number and loss."""
    config.device.require()
    torch.set_num_threads(config.device.threads)
    task = data.load(config.task)
    model = build(config.model, config.seed).to(config.device.kind)
    before = _profile(config, task, model)
    losses: list[float] = []
    norms: list[float | None] = []
    for step, (loss, norm) in enumerate(optimisation_steps(config, task, model)):
        if not math.isfinite(loss):
            break
        losses.append(loss)
        norms.append(norm if math.isfinite(norm) else None)
        report(step, loss)
    finished = len(losses) == config.optimisation.steps
    validation = evaluate(config, task, model, "validation") if finished else None
    test = evaluate(config, task, model, "test") if finished else None
    return RunRecord(
        config=config,
        outcome=_outcome(validation, task.context_free_loss),
        parameters=sum(p.numel() for p in model.parameters()),
        train_loss=tuple(losses),
        gradient_norm=tuple(norms),
        context_free_loss=task.context_free_loss,
        validation_loss=validation and validation[0],
        test_loss=test and test[0],
        test_accuracy=test and test[1],
        profile_before=before,
        profile_after=_profile(config, task, model) if validation else {},
    )


def _outcome(validation: tuple[float, float] | None, context_free_loss: float) -> Outcome:
    if validation is None:
        return "diverged"
    return "trained" if validation[0] < context_free_loss - STALL_MARGIN else "stalled"


def optimisation_steps(config: RunConfig, task: data.Task, model: Decoder | ResNet) -> Iterator[tuple[float, float]]:
    """Trains `model` in place; loss and gradient norm of each step, yielded before the step's update."""
    recipe, device = config.optimisation, config.device
    parameters = list(model.parameters())
    groups = parameter_groups(model, config.learning_rate, recipe.weight_decay)
    peaks = [group["lr"] for group in groups]
    optimiser = torch.optim.AdamW(
        groups,
        betas=(recipe.beta1, recipe.beta2),
        fused=True,
    )
    scaler = torch.amp.GradScaler(device.kind, enabled=device.precision == "float16")
    if device.compile:
        torch._dynamo.reset()  # else the runs before this one count towards dynamo's limit, and it compiles no more
        for block in model.blocks:  # the block, not the model: all blocks share one compilation
            block.compile()
    model.stack.checkpointing = device.checkpointing
    model.train()
    for step in range(recipe.steps):
        inputs, targets = _to_device(task.batch(config.seed, step, recipe.batch), device)
        with _autocast(device):
            loss = loss_of(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimiser)
        norm = nn.utils.clip_grad_norm_(parameters, recipe.clip, foreach=True)
        yield float(loss.detach()), float(norm)
        for group, peak in zip(optimiser.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(recipe, step)
        scaler.step(optimiser)
        scaler.update()
        optimiser.zero_grad()


def _autocast(device: Device) -> torch.autocast:
    return torch.autocast(device.kind, getattr(torch, device.precision), enabled=device.precision != "float32")


def _to_device(batch: tuple[Tensor, Tensor], device: Device) -> tuple[Tensor, Tensor]:
    return batch[0].to(device.kind), batch[1].to(device.kind)


@torch.no_grad()
def evaluate(config: RunConfig, task: data.Task, model: nn.Module, split: data.Split) -> tuple[float, float] | None:
    """Mean loss in nats and accuracy over a held-out split, or None when the loss is not finite."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    for batch in task.held_out(split):
        inputs, targets = _to_device(batch, config.device)
        with _autocast(config.device):
            logits = model(inputs)
        loss += float(loss_of(logits.float(), targets)) * targets.numel()
        right += int((logits.argmax(-1) == targets).sum())
        count += targets.numel()
    return (loss / count, right / count) if math.isfinite(loss) else None


def _profile(config: RunConfig, task: data.Task, model: Decoder | ResNet) -> dict[str, tuple[float | None, ...]]:
    """The stream's profile on the first held-out validation batch, of up to 16 examples."""
    inputs, targets = _to_device(next(task.held_out("validation")), config.device)
    profile = stream_profile(model, inputs[:16], targets[:16])
    return {measure: tuple(v if math.isfinite(v) else None for v in values) for measure, values in profile.items()}
