"""One run: deterministic, by the recipe, and with an outcome whatever happens to its loss."""

import math
import shutil
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from reslab import data, training
from reslab.data import DigitsConfig
from reslab.models.decoder import DecoderConfig
from reslab.models.diffusion import DiffusionConfig
from reslab.models.image_encoder import ImageEncoderConfig
from reslab.models.resnet import ResNetConfig
from reslab.models.state_space import StateSpace, StateSpaceConfig
from reslab.models.unet import UNetConfig
from reslab.residuals import Block, ConnectionConfig
from reslab.schema import UserError
from reslab.training import (
    Device,
    Optimisation,
    RunConfig,
    RunRecord,
    build,
    evaluate,
    parameter_groups,
    schedule,
    train,
)


def with_model(config: RunConfig, **changed: Any) -> RunConfig:
    model = DecoderConfig.model_validate(config.model.model_dump() | changed)
    return config.model_copy(update={"model": model})


def with_recipe(config: RunConfig, **changed: Any) -> RunConfig:
    recipe = Optimisation.model_validate(config.optimisation.model_dump() | changed)
    return config.model_copy(update={"optimisation": recipe})


def at(config: RunConfig, **changed: Any) -> RunConfig:
    return config.model_copy(update=changed)


# --- determinism and the record -------------------------------------------------------------------


def test_same_seed_gives_the_same_record(tiny: RunConfig) -> None:
    first = train(tiny)
    torch.manual_seed(99)
    assert train(tiny).model_dump_json() == first.model_dump_json()


def test_other_seed_gives_another_record(tiny: RunConfig) -> None:
    first, other = train(tiny), train(at(tiny, seed=1))
    assert first.train_loss != other.train_loss
    assert first.profile_before != other.profile_before
    assert first.test_loss != other.test_loss


def test_record_survives_json(tiny: RunConfig) -> None:
    record = train(tiny)
    assert RunRecord.model_validate_json(record.model_dump_json()) == record


def test_record_holds_every_step(tiny: RunConfig) -> None:
    reported: list[tuple[int, float]] = []
    record = train(tiny, lambda step, loss: reported.append((step, loss)))
    assert reported == list(enumerate(record.train_loss))
    assert len(record.train_loss) == len(record.gradient_norm) == 6
    assert record.config == tiny
    assert record.parameters == sum(p.numel() for p in build(tiny.model, 0).parameters())
    assert record.context_free_loss == data.load(tiny.task).context_free_loss("test")
    places = dict.fromkeys(("gradient_norm", "mean_square", "token_cosine", "effective_rank"), 3)
    between = dict.fromkeys(("neighbour_cosine", "mean_shift"), 2)
    assert {measure: len(values) for measure, values in record.profile_after.items()} == places | between


def test_run_for_choosing_a_rate_measures_its_validation_loss_alone(tiny: RunConfig) -> None:
    full, short = train(tiny), train(at(tiny, validation_only=True))
    assert (short.validation_loss, short.train_loss) == (full.validation_loss, full.train_loss)
    assert short.outcome == full.outcome
    assert (short.test_loss, short.test_accuracy) == (None, None)
    assert short.profile_before == short.profile_after == {}


def test_digits_run_is_deterministic(tiny: RunConfig) -> None:
    net = ResNetConfig(channels=2, depth=1, classes=10)
    config = at(with_recipe(tiny, batch=32, steps=4), task=DigitsConfig(), model=net)
    record = train(config)
    assert record == train(config)
    assert record.test_accuracy is not None
    assert 0 <= record.test_accuracy <= 1


# --- the recipe -----------------------------------------------------------------------------------


def plain_losses(config: RunConfig) -> tuple[list[float], list[float]]:
    """The same training written out plainly: losses and gradient norms."""
    recipe, task, model = config.optimisation, data.load(config.task), build(config.model, config.seed)
    decayed = [p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
    free = [p for name, p in model.named_parameters() if p.ndim != 2 or "embedding" in name]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": free, "weight_decay": 0.0}]
    betas = (recipe.beta1, recipe.beta2)
    optimiser = torch.optim.AdamW(groups, weight_decay=recipe.weight_decay, betas=betas, foreach=False, fused=False)
    losses, norms = [], []
    for step in range(recipe.steps):
        inputs, targets = task.batch(config.seed, step, recipe.batch)
        loss = F.cross_entropy(model(inputs).transpose(1, 2), targets)
        optimiser.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= min(1.0, recipe.clip / norm)
        for group in optimiser.param_groups:
            group["lr"] = config.learning_rate * schedule(recipe, step)
        optimiser.step()
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms


def test_training_is_the_recipe_written_out(tiny: RunConfig) -> None:
    config = with_recipe(at(tiny, learning_rate=3e-2), weight_decay=1.0, clip=0.5, steps=12)
    record, (losses, norms) = train(config), plain_losses(config)
    np.testing.assert_allclose(record.train_loss, losses, rtol=1e-4)
    np.testing.assert_allclose(np.array(record.gradient_norm, dtype=float), norms, rtol=1e-3)
    assert max(norms) > 0.5  # clipping had work to do
    without_decay = train(with_recipe(config, weight_decay=0.0))
    assert abs(without_decay.train_loss[-1] - record.train_loss[-1]) > 1e-3


def recipe(**changed: Any) -> Optimisation:
    plain = {"batch": 1, "steps": 200, "warmup": 0.1, "final_rate": 0.1, "weight_decay": 0.1}
    return Optimisation.model_validate({**plain, "beta1": 0.9, "beta2": 0.95, "clip": 1.0, **changed})


def test_schedule_rises_to_the_peak_and_falls_to_the_final_rate() -> None:
    rates = [schedule(recipe(), step) for step in range(200)]
    np.testing.assert_allclose(rates[:20], np.arange(1, 21) / 20)
    assert max(rates) == 1
    assert all(later < earlier for earlier, later in pairwise(rates[20:]))
    assert rates[110] == pytest.approx(0.1 + 0.9 / 2)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("changed", [{"steps": 1}, {"steps": 2, "warmup": 0.9}, {"steps": 7, "warmup": 0.3}])
def test_schedule_of_short_runs_stays_in_bounds(changed: dict[str, Any]) -> None:
    short = recipe(**changed)
    rates = [schedule(short, step) for step in range(short.steps)]
    assert all(0 < rate <= 1 for rate in rates)
    assert max(rates) == 1


def test_schedule_without_warmup_starts_at_the_peak() -> None:
    assert schedule(recipe(warmup=0.0), 0) == 1
    assert schedule(recipe(warmup=0.0, final_rate=1.0), 150) == 1


def names_by_decay(model: nn.Module) -> tuple[set[str], set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {group["weight_decay"]: group for group in parameter_groups(model, 1e-3, 0.1)}
    assert groups.keys() == {0.1, 0.0}
    assert all(group["lr"] == 1e-3 for group in groups.values())
    first, second = ({names[id(p)] for p in groups[decay]["params"]} for decay in (0.1, 0.0))
    assert first | second == set(names.values())
    assert not first & second
    return first, second


def test_only_matrices_decay(tiny: RunConfig) -> None:
    shape = {"connection": ConnectionConfig(kind="rezero"), "depth": 1}
    decayed, free = names_by_decay(build(with_model(tiny, **shape).model, 0))
    matrices = ("attention.branch.query_key_value", "attention.branch.project", "mlp.branch.up", "mlp.branch.down")
    assert decayed == {f"stack.blocks.0.{name}.weight" for name in matrices} | {"head.weight"}
    assert {"token_embedding.weight", "position_embedding.weight", "norm.weight", "norm.bias"} < free
    assert {"stack.blocks.0.attention.connection.alpha", "stack.blocks.0.mlp.norm_input.weight"} < free


def test_tied_head_does_not_decay(tiny: RunConfig) -> None:
    decayed, free = names_by_decay(build(with_model(tiny, tied_head=True, embedding="gpt2").model, 0))
    assert "token_embedding.weight" in free
    assert len(decayed) == 4 * 2


def test_convolutions_decay_and_batch_norms_do_not() -> None:
    decayed, free = names_by_decay(build(ResNetConfig(channels=2, depth=1, classes=10), 0))
    convolutions = {"stem.weight", *(f"stack.blocks.0.convolutions.branch.{i}.weight" for i in (2, 5))}
    assert decayed == convolutions | {"head.weight"}
    assert "stack.blocks.0.convolutions.branch.0.weight" in free


def test_evaluation_weighs_every_target_alike(tiny: RunConfig) -> None:
    """40 windows arrive as batches of 32 and 8."""
    task, model = data.load(tiny.task), build(tiny.model, 0)
    batches = list(task.held_out("test"))
    assert [len(inputs) for inputs, _ in batches] == [32, 8]
    logits = torch.cat([model(inputs) for inputs, _ in batches]).detach().double()
    targets = torch.cat([targets for _, targets in batches])
    direct = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    accuracy = (logits.argmax(-1) == targets).double().mean()
    assert evaluate(tiny, task, model, "test") == pytest.approx((direct.item(), accuracy.item()))


# --- outcomes -------------------------------------------------------------------------------------


def test_learning_run_is_trained(tiny: RunConfig) -> None:
    record = train(with_recipe(at(tiny, learning_rate=3e-2), steps=80))
    assert record.outcome == "trained"
    assert record.validation_loss is not None
    assert record.validation_loss < data.load(tiny.task).context_free_loss("validation") - training.STALL_MARGIN


def test_run_that_learns_nothing_is_stalled(tiny: RunConfig) -> None:
    record = train(at(tiny, learning_rate=1e-9))
    assert record.outcome == "stalled"
    assert record.train_loss[-1] == pytest.approx(record.train_loss[0], abs=0.3)


def test_outcome_is_judged_by_the_best_guess_on_the_same_windows(
    tiny: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits differ in how well a guess without context does: by more than the margin in the corpora here."""
    guesses = {"validation": 0.1, "test": 99.0}
    monkeypatch.setattr(data.Text, "context_free_loss", lambda self, split: guesses[split])
    record = train(with_recipe(at(tiny, learning_rate=3e-2), steps=80))
    assert record.outcome == "stalled"
    assert record.context_free_loss == 99.0


def test_stall_margin_decides() -> None:
    assert training._outcome((2.90, 0.3), 3.0) == "trained"
    assert training._outcome((2.96, 0.3), 3.0) == "stalled"
    assert training._outcome(None, 3.0) == "diverged"


@pytest.mark.parametrize("placement", ["pre", "none"])
def test_huge_learning_rate_diverges(tiny: RunConfig, placement: str) -> None:
    record = train(with_model(with_recipe(at(tiny, learning_rate=1e4), steps=30), placement=placement))
    assert record.outcome == "diverged"
    assert len(record.train_loss) < 30
    assert (record.validation_loss, record.test_loss, record.test_accuracy) == (None, None, None)
    assert record.profile_after == {}


@pytest.mark.parametrize("finite_steps", [0, 3])
def test_loss_that_is_no_number_ends_the_run(
    tiny: RunConfig, finite_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = training.loss_of, iter(range(-1, 100))  # the profile of the start comes first

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return plain(logits, targets) * (1 if next(calls) < finite_steps else math.nan)

    monkeypatch.setattr(training, "loss_of", loss_of)
    record = train(tiny)
    assert record.outcome == "diverged"
    assert len(record.train_loss) == len(record.gradient_norm) == finite_steps
    assert RunRecord.model_validate_json(record.model_dump_json()) == record


def test_run_whose_last_update_breaks_it_is_diverged(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = training.loss_of, iter(range(-1, 100))  # the profile of the start comes first

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return plain(logits, targets) * (1 if next(calls) < 6 else math.inf)

    monkeypatch.setattr(training, "loss_of", loss_of)
    record = train(tiny)
    assert len(record.train_loss) == 6
    assert record.outcome == "diverged"


def test_run_that_is_not_finite_from_the_start_is_diverged(tiny: RunConfig) -> None:
    """Without norms a stream may overflow before the first step."""
    record = train(with_model(tiny, placement="none", init_std=1e6, depth=8))
    assert record.outcome == "diverged"


def test_run_whose_stream_vanishes_has_a_record(tiny: RunConfig) -> None:
    """Without norms and skips it underflows to exactly 0, where a rank is 0 / 0."""
    none = ConnectionConfig(kind="none")
    record = train(with_model(tiny, placement="none", init_std=0.01, depth=24, connection=none))
    assert record.outcome == "stalled"


def test_shortest_context_that_is_accepted_trains(tiny: RunConfig) -> None:
    """One token has no other to compare its direction with."""
    try:
        config = with_model(tiny, context=1)
    except ValidationError:
        return
    assert isinstance(tiny.task, data.TextConfig)
    assert len(train(at(config, task=tiny.task.model_copy(update={"context": 1}))).train_loss) == 6


# --- devices --------------------------------------------------------------------------------------


def test_missing_cuda_is_a_user_error(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"device\.kind: cuda asked for, but PyTorch finds no CUDA device"):
        train(at(tiny, device=Device(kind="cuda")))


def test_low_precision_on_the_cpu_is_refused() -> None:
    with pytest.raises(UserError, match="precision bfloat16 needs kind: cuda"):
        Device(precision="bfloat16")


def test_threads_are_those_asked_for(tiny: RunConfig) -> None:
    train(at(with_recipe(tiny, steps=1), device=Device(threads=2)))
    assert torch.get_num_threads() == 2


# --- compilation ----------------------------------------------------------------------------------

# Dynamo hides this one from users, but not from a filter that turns warnings into errors.
ignore_dynamo = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
ignore_inductor = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class Frames:
    """A backend that runs what Dynamo traced as it is, and counts it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.count += 1
        return graph.forward


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Frames:
    """Counts what the blocks compile; without a compiler."""
    counted = Frames()
    plain = nn.Module.compile
    monkeypatch.setattr(Block, "compile", lambda block: plain(block, backend=counted))
    torch._dynamo.reset()
    return counted


@ignore_dynamo
def test_all_blocks_share_one_compilation(tiny: RunConfig, frames: Frames) -> None:
    config = at(with_model(tiny, depth=6), device=Device(compile=True))
    list(training.optimisation_steps(config, data.load(config.task), build(config.model, 0)))
    assert frames.count == 1


@ignore_dynamo
def test_every_run_of_a_sweep_is_compiled(tiny: RunConfig, frames: Frames) -> None:
    """Dynamo gives up, and runs everything uncompiled, after eight versions of a function in one process."""
    compiled = []
    for weight in (0.1, 0.3, 0.5, 0.7, 0.9):
        before = frames.count
        connection = ConnectionConfig("weighted_skip", weight=weight)
        train(at(with_model(with_recipe(tiny, steps=2), connection=connection), device=Device(compile=True)))
        compiled.append(frames.count - before)
    assert min(compiled) >= 1


@ignore_dynamo
def test_traced_run_is_the_plain_one(tiny: RunConfig, frames: Frames) -> None:
    plain, traced = train(tiny), train(at(tiny, device=Device(compile=True)))
    assert frames.count > 0
    np.testing.assert_allclose(traced.train_loss, plain.train_loss, rtol=1e-5)
    assert traced.test_loss == pytest.approx(plain.test_loss, rel=1e-5)
    for measure, values in plain.profile_after.items():
        assert traced.profile_after[measure] == pytest.approx(values, rel=1e-3)


@ignore_dynamo
@ignore_inductor
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_training_is_nearly_the_plain_one(tiny: RunConfig) -> None:
    torch._dynamo.reset()
    plain = with_model(with_recipe(tiny, steps=3), depth=1)
    losses = []
    for config in (plain, at(plain, device=Device(compile=True))):
        steps = training.optimisation_steps(config, data.load(config.task), build(config.model, 0))
        losses.append([loss for loss, _ in steps])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


# --- every model on its task ----------------------------------------------------------------------

IMAGES: dict[str, Any] = {"width": 8, "heads": 2, "depth": 2, "init_std": 0.3}

RUNS: dict[str, tuple[Any, Any]] = {
    "classes": (DigitsConfig(), ImageEncoderConfig(**IMAGES, classes=10)),
    "masked pixels": (data.MaskedDigitsConfig(), ImageEncoderConfig(**IMAGES | {"width": 32}, head="reconstruction")),
    "noise": (data.NoisyDigitsConfig(), DiffusionConfig(**IMAGES, classes=10)),
    "noise by a U-Net": (data.NoisyDigitsConfig(labels=False), UNetConfig(channels=4, depth=1)),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", ["add", "attnres"])
def test_every_model_learns_its_task(tiny: RunConfig, name: str, kind: str) -> None:
    task, model = RUNS[name]
    model = model.model_copy(update={"connection": ConnectionConfig(kind)})
    config = at(with_recipe(tiny, batch=64, steps=120), task=task, model=model, learning_rate=5e-3)
    config = RunConfig.model_validate(config.model_dump())
    record = train(config)
    assert record.test_loss is not None
    assert record.test_loss < 0.99 * record.context_free_loss
    assert (record.test_accuracy is None) == (name != "classes")
    places = 6 if name == "noise by a U-Net" else 3
    assert len(record.profile_after["gradient_norm"]) == places
    assert RunRecord.model_validate_json(record.model_dump_json()) == record


@pytest.mark.parametrize("mixer", ["state", "increment", "diagonal"])
def test_recurrent_models_learn_text(tiny: RunConfig, mixer: str) -> None:
    shape = tiny.model.model_dump(exclude={"kind", "heads"})
    model = StateSpaceConfig.model_validate(shape | {"mixer": mixer})
    record = train(at(with_recipe(tiny, steps=30), model=model, learning_rate=1e-2))
    assert record.train_loss[-1] < record.train_loss[0] - 0.5
    assert type(build(model, 0)) is StateSpace


@pytest.mark.parametrize(
    ("task", "model", "message"),
    [
        (DigitsConfig(), RUNS["masked pixels"][1], "digits trains .*, not image_encoder with head: reconstruction"),
        (data.MaskedDigitsConfig(), RUNS["classes"][1], "masked_digits trains image_encoder with head: reconstruction"),
        (data.MaskedDigitsConfig(patch=4), RUNS["masked pixels"][1], "give the model the same patch"),
        (data.NoisyDigitsConfig(), RUNS["noise by a U-Net"][1], "a unet takes no labels; set labels: false"),
        (DigitsConfig(), ImageEncoderConfig(**IMAGES, classes=5), "task digits needs a model with classes: 10, not 5"),
        (
            DigitsConfig(),
            ImageEncoderConfig(**IMAGES, classes=10, image_size=16),
            "task digits needs a model with image_size: 8, not 16",
        ),
        (DigitsConfig(), RUNS["noise"][1], "digits trains resnet or image_encoder with head: class, not diffusion"),
    ],
)
def test_model_that_does_not_suit_its_task_is_refused(tiny: RunConfig, task: Any, model: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(tiny.model_dump() | {"task": task.model_dump(), "model": model.model_dump()})


@pytest.mark.parametrize(
    ("changed", "message"), [({"vocabulary": 50}, "vocabulary: 256, not 50"), ({"context": 3}, "context: ")]
)
def test_model_of_another_size_than_the_text_is_refused(tiny: RunConfig, changed: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=f"task text needs a model with {message}"):
        RunConfig.model_validate(tiny.model_dump() | {"model": tiny.model.model_dump() | changed})


def test_values_that_are_not_asked_for_do_not_count() -> None:
    outputs, targets = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, float("nan"), 3.0])
    assert training.loss_of(outputs, targets).item() == 0.5


def test_checkpointing_changes_no_number(tiny: RunConfig) -> None:
    plain, saving = train(tiny), train(at(tiny, device=Device(checkpointing=True)))
    assert saving.train_loss == plain.train_loss
    assert saving.test_loss == plain.test_loss


def test_depth_queries_move_at_their_own_rate(tiny: RunConfig) -> None:
    """AdamW's first step has the size of the learning rate, whatever the gradient."""

    def first_step(rate: float) -> float:
        config = with_recipe(
            with_model(tiny, connection=ConnectionConfig("attnres", query_rate=rate)), steps=1, warmup=0.0
        )
        model = build(config.model, 0)
        list(training.optimisation_steps(config, data.load(config.task), model))
        query = model.get_parameter("stack.blocks.1.attention.connection.weights.query")
        return float(query.detach().abs().max())

    assert first_step(0.1) == pytest.approx(0.1 * first_step(1.0), rel=1e-3)
    assert first_step(1.0) > 0
