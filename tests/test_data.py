"""Corpora and tasks: checked, split by document, and the same batches for the same seed and step."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import pytest
import torch

from reslab import data, params, paths
from reslab.data import (
    Corpus,
    CorpusConfig,
    Digits,
    DigitsConfig,
    MaskedDigits,
    MaskedDigitsConfig,
    NoisyDigits,
    NoisyDigitsConfig,
    Text,
    TextConfig,
)
from reslab.schema import UserError


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], CorpusConfig]:
    def to_file(content: bytes) -> CorpusConfig:
        path = tmp_path / "text.txt"
        path.write_bytes(content)
        return CorpusConfig(source=str(path))

    return to_file


def numbered_lines(count: int) -> bytes:
    return b"".join(b"line %06d\n" % number for number in range(count))


def text_of(corpus: CorpusConfig, context: int = 8, windows: int = 40) -> Text:
    return Text(TextConfig(corpus=corpus, context=context, evaluation_windows=windows))


# --- the corpus -----------------------------------------------------------------------------------


def test_default_corpus_is_the_pinned_one() -> None:
    pinned = params.read().corpus
    assert pinned.sha256 is not None
    corpus = Corpus(pinned)
    assert corpus.sha256 == pinned.sha256
    sizes = {name: len(part) for name, part in corpus.splits.items()}
    assert sum(sizes.values()) > 8e6
    assert max(int(part.max()) for part in corpus.splits.values()) < 128


def test_mismatch_of_default_corpus_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"SHA-256 is [0-9a-f]{64}, not 0{64}.*pandas is 3\.") as caught:
        Corpus(CorpusConfig(source="pandas", sha256="0" * 64))
    assert "pip install -r requirements.lock" in str(caught.value)
    assert "corpus.sha256" in str(caught.value)


def test_mismatch_of_own_text_says_what_to_do(write: Callable[[bytes], CorpusConfig]) -> None:
    config = write(numbered_lines(500)).model_copy(update={"sha256": "0" * 64})
    with pytest.raises(UserError, match=r"text\.txt: SHA-256 is .*set corpus\.sha256 to the new value"):
        Corpus(config)


def test_sha256_is_that_of_the_file(write: Callable[[bytes], CorpusConfig]) -> None:
    content = numbered_lines(500)
    digest = hashlib.sha256(content).hexdigest()
    assert Corpus(write(content).model_copy(update={"sha256": digest})).sha256 == digest


def test_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.txt: cannot read it \(No such file.*give the path of a text file"):
        Corpus(CorpusConfig(source=str(tmp_path / "absent.txt")))


def test_folder_as_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read it \(Is a directory\)"):
        Corpus(CorpusConfig(source=str(tmp_path)))


@pytest.mark.parametrize("content", [b"", b"x", b"a\n" * 5, numbered_lines(15)])
def test_short_text_is_refused(write: Callable[[bytes], CorpusConfig], content: bytes) -> None:
    with pytest.raises(UserError, match=r"too short; its \w+ split has \d+ bytes, .* needs at least 17"):
        text_of(write(content), context=16)


def test_relative_path_starts_at_the_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    (tmp_path / "mine.txt").write_bytes(numbered_lines(500))
    assert len(Corpus(CorpusConfig(source="mine.txt")).splits["train"]) > 4000


@pytest.mark.parametrize("content", [numbered_lines(3000), bytes(range(256)) * 100], ids=["lines", "no text"])
def test_splits_cover_all_and_share_no_document(write: Callable[[bytes], CorpusConfig], content: bytes) -> None:
    splits = {name: part.tobytes() for name, part in Corpus(write(content)).splits.items()}
    assert Counter(b"".join(splits.values())) == Counter(content)
    for name in ("validation", "test"):
        assert 0.05 <= len(splits[name]) / len(content) < 0.06
    assert len(splits["train"]) / len(content) > 0.88


def test_documents_stay_whole(write: Callable[[bytes], CorpusConfig]) -> None:
    config = write(numbered_lines(3000))
    splits = [part.tobytes() for part in Corpus(config).splits.values()]
    documents = data._documents(config.source)
    assert b"".join(documents) == numbered_lines(3000)
    assert all(document.endswith(b"\n") for document in documents)
    assert all(sum(document in split for split in splits) == 1 for document in documents)
    lines = [set(split.splitlines()) for split in splits]
    assert sum(map(len, lines)) == len(set.union(*lines)) == 3000


def test_bytes_beyond_ascii_survive(write: Callable[[bytes], CorpusConfig]) -> None:
    content = ("Größe — 大きさ\n".encode() + b"\xff\xfe\n") * 400
    text = text_of(write(content))
    assert Counter(b"".join(part.tobytes() for part in text.corpus.splits.values())) == Counter(content)
    inputs, _ = text.batch(0, 0, 200)
    assert set(inputs.flatten().tolist()) == set(content)


# --- downloads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["tinyshakespeare", "enwik8"])
@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (OSError("no route"), "connect to the network, or set corpus.source"),
        (ConnectionError("refused"), "connect to the network, or set corpus.source"),
        (ValueError("SHA256 hash does not match"), "SHA256 hash does not match; the source has changed"),
    ],
)
def test_failed_download_says_what_to_do(
    source: str, raised: Exception, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def retrieve(*args: Any, **options: Any) -> str:
        raise raised

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    monkeypatch.setattr(paths, "DATA", tmp_path)
    with pytest.raises(UserError, match=f"corpus {source}: ") as caught:
        Corpus(CorpusConfig(source=source))
    assert words in str(caught.value)


def test_download_is_checked_and_unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def retrieve(address: str, digest: str, **options: Any) -> list[str]:
        asked.update(options, address=address, digest=digest)
        (tmp_path / "enwik8").write_bytes(numbered_lines(500))
        return [str(tmp_path / "enwik8")]

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    monkeypatch.setattr(paths, "DATA", tmp_path)
    assert len(Corpus(CorpusConfig(source="enwik8")).splits["train"]) > 4000
    assert asked["digest"] == "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
    assert asked["path"] == tmp_path
    assert isinstance(asked["processor"], pooch.Unzip)


# --- text -----------------------------------------------------------------------------------------


def test_targets_are_the_next_bytes(small_text: TextConfig) -> None:
    text = Text(small_text)
    for inputs, targets in (text.batch(0, 0, 5), next(text.held_out("validation"))):
        assert inputs.shape == targets.shape == (len(inputs), 16)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    train = text.corpus.splits["train"].tobytes()
    inputs, targets = text.batch(0, 0, 5)
    assert all(bytes([*row, int(last)]) in train for row, last in zip(inputs, targets[:, -1], strict=True))


def test_batches_depend_on_seed_and_step_alone(small_text: TextConfig) -> None:
    one, other = Text(small_text), Text(small_text)
    first = [one.batch(3, step, 4)[0] for step in range(4)]
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    again = [other.batch(3, step, 4)[0] for step in reversed(range(4))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(first[0], b) for b in first[1:])
    assert not torch.equal(first[1], one.batch(4, 1, 4)[0])
    assert not torch.equal(one.batch(1, 3, 4)[0], one.batch(3, 1, 4)[0])


def test_batches_reach_both_ends_of_the_text(write: Callable[[bytes], CorpusConfig]) -> None:
    text = text_of(write(numbered_lines(80)), context=32)
    train = text.corpus.splits["train"]
    inputs, targets = text.batch(0, 0, 20000)
    assert any(row.tolist() == train[:32].tolist() for row in inputs)
    assert any(row.tolist() == train[-32:].tolist() for row in targets)


def test_held_out_is_always_the_same(small_text: TextConfig) -> None:
    one, other = Text(small_text), Text(small_text)
    one.batch(0, 0, 4)
    for split in ("validation", "test"):
        first, again = list(one.held_out(split)), list(other.held_out(split))
        assert sum(len(inputs) for inputs, _ in first) == 40
        assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
        held = one.corpus.splits[split]
        assert first[0][0][0].tolist() == held[:16].tolist()
        assert first[-1][1][-1].tolist() == held[-16:].tolist()
    assert not torch.equal(next(one.held_out("validation"))[0], next(one.held_out("test"))[0])


@pytest.mark.parametrize("split", ["validation", "test"])
def test_unigram_loss_is_that_of_byte_frequencies(small_text: TextConfig, split: data.Split) -> None:
    text = Text(small_text)
    train = text.corpus.splits["train"].tobytes()
    counts, total = Counter(train), len(train) + 256
    targets = [int(t) for _, batch in text.held_out(split) for t in batch.flatten()]
    direct = -sum(math.log((counts[t] + 1) / total) for t in targets) / len(targets)
    assert text.context_free_loss(split) == pytest.approx(direct, rel=1e-12)
    assert math.fsum(np.exp(text.corpus.unigram())) == pytest.approx(1)


def test_task_is_read_once(small_text: TextConfig) -> None:
    assert data.load(small_text) is data.load(small_text.model_copy())


# --- digits ---------------------------------------------------------------------------------------


def image_set(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_digits_splits_are_disjoint() -> None:
    digits = Digits(DigitsConfig())
    validation, test = (next(digits.held_out(split))[0] for split in ("validation", "test"))
    train = digits.batch(0, 0, 1197)[0]
    sets = [image_set(part) for part in (validation, test, train)]
    assert [len(part) for part in sets] == [300, 300, 1197]
    assert len(set.union(*sets)) == 1797


def test_digits_are_scaled_and_of_ten_classes() -> None:
    images, classes = Digits(DigitsConfig()).batch(0, 0, 500)
    assert images.shape == (500, 1, 8, 8)
    assert (float(images.min()), float(images.max())) == (-1.0, 1.0)
    assert set(classes.tolist()) == set(range(10))


def test_digits_batches_depend_on_seed_and_step() -> None:
    one, other = Digits(DigitsConfig()), Digits(DigitsConfig())
    assert torch.equal(one.batch(1, 2, 8)[0], other.batch(1, 2, 8)[0])
    assert not torch.equal(one.batch(1, 2, 8)[0], one.batch(1, 3, 8)[0])
    assert not torch.equal(one.batch(1, 2, 8)[0], one.batch(2, 2, 8)[0])


def test_digits_context_free_loss_is_about_that_of_class_frequencies() -> None:
    digits = Digits(DigitsConfig())
    shares = np.bincount(digits.classes[600:], minlength=10) / 1197
    frequencies = -np.log(shares)[next(digits.held_out("test"))[1]].mean()
    assert digits.context_free_loss("test") == pytest.approx(frequencies, abs=0.01)


def test_batch_larger_than_the_digits_is_a_user_error() -> None:
    with pytest.raises(UserError, match="1197"):
        Digits(DigitsConfig()).batch(0, 0, 1198)


# --- tasks made from the digits -------------------------------------------------------------------


def test_masked_digits_ask_for_what_is_masked() -> None:
    task = MaskedDigits(MaskedDigitsConfig(patch=2, fraction=0.5))
    (images, masked), targets = task.batch(0, 0, 6)
    assert images.shape == targets.shape == (6, 1, 8, 8)
    assert masked.sum(-1).tolist() == [8] * 6
    for image, mask, target in zip(images[:, 0], masked, targets[:, 0], strict=True):
        for row in range(8):
            for column in range(8):
                hidden = mask[4 * (row // 2) + column // 2]
                assert torch.equal(target[row, column], image[row, column]) if hidden else target[row, column].isnan()


def test_masked_digits_context_free_loss_is_that_of_the_mean_image() -> None:
    task = MaskedDigits(MaskedDigitsConfig())
    assert 0.2 < task.context_free_loss("test") < 0.4
    whole = MaskedDigits(MaskedDigitsConfig(fraction=0.99))
    mean = Digits(DigitsConfig()).images[600:].mean(0)
    direct = (Digits(DigitsConfig()).images[300:600] - mean).square().mean()
    assert whole.context_free_loss("test") == pytest.approx(float(direct), rel=0.02)


def test_patch_that_does_not_divide_the_digits_is_refused() -> None:
    with pytest.raises(UserError, match="patch 3 does not divide the digits' 8 pixels; use 1, 2 or 4"):
        MaskedDigitsConfig(patch=3)


def test_noise_is_mixed_in_with_its_share_of_the_variance() -> None:
    task = NoisyDigits(NoisyDigitsConfig())
    (noisy, time, classes), noise = task.batch(0, 0, 1000)
    images = task.digits.batch(0, 0, 1000)[0]
    share = (torch.pi / 2 * time).cos().square().view(-1, 1, 1, 1)
    torch.testing.assert_close(noisy, share.sqrt() * images + (1 - share).sqrt() * noise, atol=1e-4, rtol=1e-3)
    assert torch.equal(classes, task.digits.batch(0, 0, 1000)[1])
    assert (float(noise.mean()), float(noise.std())) == pytest.approx((0, 1), abs=0.02)
    assert 0 <= float(time.min()) < 0.01 < 0.99 < float(time.max()) < 1


def test_noise_without_labels() -> None:
    inputs, _ = NoisyDigits(NoisyDigitsConfig(labels=False)).batch(0, 0, 3)
    assert len(inputs) == 2


def test_context_free_noise_loss_is_its_variance() -> None:
    assert NoisyDigits(NoisyDigitsConfig()).context_free_loss("test") == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("task", [MaskedDigits(MaskedDigitsConfig()), NoisyDigits(NoisyDigitsConfig())])
def test_what_is_drawn_depends_on_seed_and_step_or_on_the_split(task: MaskedDigits | NoisyDigits) -> None:
    def drawn(batch: data.Batch) -> torch.Tensor:
        return batch[1].nan_to_num(9)

    assert torch.equal(drawn(task.batch(1, 2, 8)), drawn(task.batch(1, 2, 8)))
    assert not torch.equal(drawn(task.batch(1, 2, 8)), drawn(task.batch(1, 3, 8)))
    assert not torch.equal(drawn(task.batch(1, 2, 8)), drawn(task.batch(2, 2, 8)))
    validation, test = (drawn(next(task.held_out(split))) for split in ("validation", "test"))
    assert torch.equal(validation, drawn(next(task.held_out("validation"))))
    assert not torch.equal(validation, test)


# --- pointer chasing ------------------------------------------------------------------------------


@pytest.mark.parametrize("hops", [1, 2, 5])
def test_hops_follow_the_table(hops: int) -> None:
    config = data.HopsConfig(symbols=5, queries=7, hops=hops)
    inputs, targets = data.Hops(config).batch(0, 3, 20)
    assert inputs.shape == targets.shape == (20, config.context)
    assert bool((targets[:, :5] == data.NOT_ASKED).all())
    for tokens, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        table = tokens[:5]
        assert sorted(table) == [0, 1, 2, 3, 4]
        for token, target in zip(tokens[5:], wanted[5:], strict=True):
            at = token - 5
            for _ in range(hops):
                at = table[at]
            assert target == at


def test_hops_are_new_in_every_batch_and_the_same_on_repeat() -> None:
    task = data.Hops(data.HopsConfig(hops=2))
    assert torch.equal(task.batch(0, 0, 8)[0], task.batch(0, 0, 8)[0])
    drawn = [task.batch(seed, step, 8)[0] for seed in (0, 1) for step in (0, 1)]
    drawn += [next(task.held_out(split))[0][:8] for split in ("validation", "test")]
    assert len({str(each.tolist()) for each in drawn}) == 6
    assert task.context_free_loss("test") == pytest.approx(math.log(6))


# --- recall ---------------------------------------------------------------------------------------


def test_recall_asks_for_what_came_first() -> None:
    config = data.RecallConfig(symbols=3, distractors=4, length=5)
    inputs, targets = data.Recall(config).batch(0, 3, 200)
    assert inputs.shape == targets.shape == (200, config.context) == (200, 7)
    assert config.vocabulary == 8
    assert sorted(inputs[:, 0].unique().tolist()) == [0, 1, 2]
    assert sorted(inputs[:, 1:-1].unique().tolist()) == [3, 4, 5, 6]
    assert inputs[:, -1].unique().tolist() == [7]
    assert (targets[:, :-1] == data.NOT_ASKED).all()
    assert (targets[:, -1] == inputs[:, 0]).all()


def test_recall_is_new_in_every_batch_and_the_same_on_repeat() -> None:
    task = data.load(data.RecallConfig(length=4))
    first, again, other = (task.batch(0, step, 8)[0] for step in (0, 0, 1))
    assert isinstance(first, torch.Tensor)
    assert isinstance(again, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    validation, test = next(task.held_out("validation"))[0], next(task.held_out("test"))[0]
    assert isinstance(validation, torch.Tensor)
    assert isinstance(test, torch.Tensor)
    assert len(validation) == data.Recall.HELD_OUT
    assert not torch.equal(validation, test)
    assert task.context_free_loss("test") == pytest.approx(np.log(8))
