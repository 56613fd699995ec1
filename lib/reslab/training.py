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
from reslab.models.diffusion import DiffusionConfig, DiffusionTransformer
from reslab.models.image_encoder import ImageEncoder, ImageEncoderConfig
from reslab.models.resnet import ResNet, ResNetConfig
from reslab.models.state_space import StateSpace, StateSpaceConfig
from reslab.models.unet import UNet, UNetConfig
from reslab.probes import outputs_of, stacks, stream_profile
from reslab.residuals import compile_blocks, connection_modules, connection_rates
from reslab.schema import Settings, UserError

__all__ = [
    "Device",
    "Model",
    "ModelConfig",
    "Optimisation",
    "Outcome",
    "RunConfig",
    "RunRecord",
    "build",
    "evaluate",
    "loss_of",
    "optimisation_steps",
    "parameter_groups",
    "schedule",
    "train",
    "train_model",
]

Outcome = Literal["trained", "stalled", "diverged"]
"""`stalled`: ends less than STALL_MARGIN below the best context-free guess; `diverged`: the loss is not finite."""

STALL_MARGIN = 0.05
"""How far below the context-free loss a run must come to count as trained, in nats (or units of the squared error)."""

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


ModelConfig = DecoderConfig | StateSpaceConfig | ResNetConfig | ImageEncoderConfig | DiffusionConfig | UNetConfig

Model = Decoder | ResNet | ImageEncoder | DiffusionTransformer | UNet

MODELS: dict[str, type[Any]] = {
    "decoder": Decoder,
    "state_space": StateSpace,
    "resnet": ResNet,
    "image_encoder": ImageEncoder,
    "diffusion_transformer": DiffusionTransformer,
    "unet": UNet,
}
"""By the kind in their config."""

SUITED = {
    "text": ("decoder", "state_space"),
    "hops": ("decoder",),
    "recall": ("decoder", "state_space"),
    "digits": ("resnet", "image_encoder with head: class"),
    "masked_digits": ("image_encoder with head: reconstruction",),
    "noisy_digits": ("diffusion_transformer", "unet"),
}
"""Which models a task trains."""


class RunConfig(Settings):
    """All that a run's numbers depend on, but for the code."""

    task: data.TaskConfig = Field(discriminator="kind")
    model: ModelConfig = Field(discriminator="kind")
    optimisation: Optimisation
    learning_rate: float = Field(gt=0)
    seed: int = Field(ge=0)
    device: Device
    validation_only: bool = False
    """Measure the validation loss alone, no test loss and no profile of the stream: for choosing learning rates."""

    @model_validator(mode="after")
    def _model_suits_task(self) -> "RunConfig":
        model: str = self.model.kind
        if isinstance(self.model, ImageEncoderConfig):
            model += f" with head: {self.model.head}"
        if model not in SUITED[self.task.kind]:
            raise ValueError(f"task {self.task.kind} trains {' or '.join(SUITED[self.task.kind])}, not {model}")
        if isinstance(self.task, data.NoisyDigitsConfig) and self.task.labels and isinstance(self.model, UNetConfig):
            raise ValueError("a unet takes no labels; set labels: false in task noisy_digits")
        if isinstance(self.task, data.MaskedDigitsConfig) and self.task.patch != getattr(self.model, "patch", None):
            raise ValueError(f"task masked_digits masks patches of {self.task.patch}; give the model the same patch")
        for name, asked in self._asked_of_model().items():
            if (found := getattr(self.model, name, asked)) != asked:
                raise ValueError(f"task {self.task.kind} needs a model with {name}: {asked}, not {found}")
        return self

    def _asked_of_model(self) -> dict[str, int]:
        """What the task's inputs and targets fix of the model."""
        if isinstance(self.task, data.TextConfig):
            return {"vocabulary": data.VOCABULARY, "context": self.task.context}
        if isinstance(self.task, data.HopsConfig | data.RecallConfig):
            return {"vocabulary": self.task.vocabulary, "context": self.task.context}
        classes = {} if isinstance(self.task, data.MaskedDigitsConfig) else {"classes": 10}
        return {"image_size": 8, "image_channels": 1} | classes


class RunRecord(Settings):
    """What a run leaves behind; `None` where a run diverged before it could be measured, or was not to be measured.

    `outcome`: see `Outcome`.

    Losses are in nats, or mean square errors where the task asks for values; these have no accuracy.
    """

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
    """The same after training; empty where the run diverged. Both are empty with `validation_only`."""


def build(config: ModelConfig, seed: int) -> Model:
    """The model at its initial weights, which depend on `config` and `seed` alone."""
    with _GENERATOR_LOCK, torch.random.fork_rng():
        model: Model = MODELS[config.kind](config)
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
    in_connections = connection_modules(model)
    decayed = {id(m.weight) for m in layers if m not in in_connections}
    decayed -= {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    rates = connection_rates(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        key = (weight_decay if id(parameter) in decayed else 0.0, learning_rate * rates.get(parameter, 1.0))
        groups.setdefault(key, []).append(parameter)
    return [{"params": group, "weight_decay": decay, "lr": rate} for (decay, rate), group in groups.items()]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats of logits [..., classes] against classes [...]; mean square error of values.

    Targets that are not asked for (`data.NOT_ASKED`, NaN) do not count.
    """
    if not targets.is_floating_point():
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=data.NOT_ASKED)
    asked = ~targets.isnan()
    return F.mse_loss(outputs[asked].float(), targets[asked])


def train(config: RunConfig, report: Callable[[int, float], None] = lambda step, loss: None) -> RunRecord:
    """Run `config` to its end. `report` gets each step's number and loss."""
    return train_model(config, report)[0]


def train_model(
    config: RunConfig, report: Callable[[int, float], None] = lambda step, loss: None
) -> tuple[RunRecord, Model]:
    """As `train`, and the model at the end of the run, or where it diverged."""
    config.device.require()
    torch.set_num_threads(config.device.threads)
    task = data.load(config.task)
    model = build(config.model, config.seed).to(config.device.kind)
    before = {} if config.validation_only else _profile(config, task, model)
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
    full = finished and not config.validation_only
    test = evaluate(config, task, model, "test") if full else None
    record = RunRecord(
        config=config,
        outcome=_outcome(validation, task.context_free_loss("validation")),
        parameters=sum(p.numel() for p in model.parameters()),
        train_loss=tuple(losses),
        gradient_norm=tuple(norms),
        context_free_loss=task.context_free_loss("test"),
        validation_loss=validation and validation[0],
        test_loss=test and test[0],
        test_accuracy=test and test[1],
        profile_before=before,
        profile_after=_profile(config, task, model) if full and validation else {},
    )
    return record, model


def _outcome(validation: tuple[float, float | None] | None, context_free_loss: float) -> Outcome:
    if validation is None:
        return "diverged"
    return "trained" if validation[0] < context_free_loss - STALL_MARGIN else "stalled"


def optimisation_steps(config: RunConfig, task: data.Task, model: Model) -> Iterator[tuple[float, float]]:
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
        compile_blocks(model)
    for stack in stacks(model):
        stack.checkpointing = device.checkpointing
    model.train()
    for step in range(recipe.steps):
        inputs, targets = _to_device(task.batch(config.seed, step, recipe.batch), device)
        with _autocast(device):
            loss = loss_of(outputs_of(model, inputs), targets)
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


def _to_device(batch: data.Batch, device: Device) -> data.Batch:
    inputs, targets = batch
    if isinstance(inputs, Tensor):
        return inputs.to(device.kind), targets.to(device.kind)
    return tuple(part.to(device.kind) for part in inputs), targets.to(device.kind)


@torch.no_grad()
def evaluate(
    config: RunConfig, task: data.Task, model: nn.Module, split: data.Split
) -> tuple[float, float | None] | None:
    """Mean loss and accuracy (of classes) over a held-out split, or None when the loss is not finite."""
    model.eval()
    loss, right, count, classes = 0.0, 0, 0, True
    for batch in task.held_out(split):
        inputs, targets = _to_device(batch, config.device)
        with _autocast(config.device):
            outputs = outputs_of(model, inputs)
        classes = not targets.is_floating_point()
        asked = int((targets != data.NOT_ASKED if classes else ~targets.isnan()).sum())
        loss += float(loss_of(outputs.float(), targets)) * asked
        right += int((outputs.argmax(-1) == targets).sum()) if classes else 0
        count += asked
    return (loss / count, right / count if classes else None) if math.isfinite(loss) else None


def _profile(config: RunConfig, task: data.Task, model: Model) -> dict[str, tuple[float | None, ...]]:
    """The stream's profile on the first held-out validation batch, of up to 16 examples."""
    inputs, targets = _to_device(next(task.held_out("validation")), config.device)
    first = inputs[:16] if isinstance(inputs, Tensor) else tuple(part[:16] for part in inputs)
    profile = stream_profile(model, first, targets[:16], loss_of)
    return {measure: tuple(v if math.isfinite(v) else None for v in values) for measure, values in profile.items()}
