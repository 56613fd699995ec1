"""Corpora and tasks: what a run trains on, and the held-out data it is judged by.

A task gives batches that depend on seed and step alone, and held-out batches that depend on nothing.
"""

import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from reslab import paths
from reslab.schema import Settings, UserError

__all__ = [
    "Corpus",
    "CorpusConfig",
    "Digits",
    "DigitsConfig",
    "Hops",
    "HopsConfig",
    "MaskedDigits",
    "MaskedDigitsConfig",
    "NoisyDigits",
    "NoisyDigitsConfig",
    "Recall",
    "RecallConfig",
    "Split",
    "Task",
    "TaskConfig",
    "Text",
    "TextConfig",
    "load",
]

Split = Literal["validation", "test"]
Inputs = Tensor | tuple[Tensor, ...]
"""What a model is called with: one tensor, or one an argument."""

Batch = tuple[Inputs, Tensor]
"""Inputs and targets. Integer targets are classes, NOT_ASKED where none is asked for; real ones are values to predict,
NaN where none is."""

NOT_ASKED = -100
"""What PyTorch's cross entropy leaves out."""

VOCABULARY = 256
"""Text is read as bytes."""

DOWNLOADS = {
    "tinyshakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "enwik8": (
        "https://mattmahoney.net/dc/enwik8.zip",
        "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    ),
}
"""Optional corpora: address and SHA-256 of what is fetched."""


class CorpusConfig(Settings):
    """Which text. `source` is `pandas`, `tinyshakespeare`, `enwik8`, or the path of a text file.

    A relative path is one from the project's folder.
    """

    source: str = Field(min_length=1)
    sha256: str | None = None
    """Checked against the bytes of all documents, in order; null skips the check."""

    @field_validator("sha256")
    @classmethod
    def _sha256_has_64_digits(cls, sha256: str | None) -> str | None:
        if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError(f"'{sha256}' is no SHA-256; give its 64 digits, 0-9 and a-f, or null for no check")
        return sha256


class Task(Protocol):
    """What a run needs of its data."""

    def batch(self, seed: int, step: int, size: int) -> Batch:
        """Training batch number `step`; the same for the same seed, step and size."""
        ...

    def held_out(self, split: Split) -> Iterator[Batch]:
        """All of a held-out split, always the same batches."""
        ...

    def context_free_loss(self, split: Split) -> float:
        """Loss (nats, or mean square error) of the best guess that does not look at the input, on a held-out split."""
        ...


# --- text -----------------------------------------------------------------------------------------


def _pandas_documents() -> list[bytes]:
    """The Python sources of the installed pandas wheel, tests left out, sorted by path."""
    spec = importlib.util.find_spec("pandas")
    if spec is None or spec.origin is None:
        raise UserError("corpus pandas: the package pandas is not installed; run `make setup`")
    root = Path(spec.origin).parent
    files = sorted(
        (path for path in root.rglob("*.py") if "tests" not in path.relative_to(root).parts),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    return [path.read_bytes().decode("ascii", errors="replace").replace("\ufffd", "?").encode() for path in files]


def _file_documents(path: Path, sections: int = 200) -> list[bytes]:
    """A text file as `sections` nearly equal documents, cut at line ends where there are some."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"corpus {path}: cannot read it ({error.strerror}); give the path of a text file") from None
    cuts = [0]
    for section in range(1, sections):
        wanted = section * len(text) // sections
        line_end = text.find(b"\n", wanted, wanted + len(text) // sections)
        cuts.append(wanted if line_end < 0 else line_end + 1)
    return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _download(name: str) -> Path:
    import pooch  # it imports tqdm.auto, which warns in notebooks

    address, digest = DOWNLOADS[name]
    unpack = pooch.Unzip(members=["enwik8"]) if address.endswith(".zip") else None
    pooch.get_logger().setLevel("WARNING")
    try:
        fetched = pooch.retrieve(address, f"sha256:{digest}", path=paths.DATA, processor=unpack)
    except ValueError as error:
        raise UserError(f"corpus {name}: {error}; the source has changed or the download broke") from None
    except OSError as error:
        raise UserError(
            f"corpus {name}: cannot fetch {address} ({type(error).__name__}); connect to the network, "
            "or set corpus.source to `pandas` or to a text file of yours"
        ) from None
    return Path(fetched[0] if isinstance(fetched, list) else fetched)


def _documents(source: str) -> list[bytes]:
    if source == "pandas":
        return _pandas_documents()
    if source in DOWNLOADS:
        return _file_documents(_download(source))
    return _file_documents(paths.ROOT / source)


def _check_sha256(config: CorpusConfig, documents: list[bytes]) -> None:
    found = hashlib.sha256(b"".join(documents)).hexdigest()
    if config.sha256 in (None, found):
        return
    advice = "set corpus.sha256 to the new value (or to null) if the change is meant"
    if config.source == "pandas":
        advice = (
            f"the installed pandas is {importlib.metadata.version('pandas')}; install the pinned version "
            f"(pip install -r requirements.lock), or {advice}"
        )
    raise UserError(f"corpus {config.source}: SHA-256 is {found}, not {config.sha256}; {advice}")


class Corpus:
    """A byte-level text, split by document into train, validation and test (90, 5 and 5 %).

    Documents are assigned in a fixed random order; none is in two splits.
    """

    def __init__(self, config: CorpusConfig) -> None:
        documents = _documents(config.source)
        _check_sha256(config, documents)
        order = np.random.default_rng(0).permutation(len(documents))
        total = sum(map(len, documents))
        parts: dict[str, list[bytes]] = {"validation": [], "test": [], "train": []}
        for index in order:
            part = next((p for p in ("validation", "test") if sum(map(len, parts[p])) < total // 20), "train")
            parts[part].append(documents[index])
        self.source = config.source
        self.sha256 = hashlib.sha256(b"".join(documents)).hexdigest()
        self.splits: dict[str, NDArray[np.uint8]] = {
            name: np.frombuffer(b"".join(part), dtype=np.uint8) for name, part in parts.items()
        }

    def unigram(self) -> NDArray[np.float64]:
        """Log-probability in nats of each byte, from the training split with add-one smoothing, [256]."""
        counts = np.bincount(self.splits["train"], minlength=VOCABULARY) + 1.0
        logs: NDArray[np.float64] = np.log(counts / counts.sum())
        return logs


class TextConfig(Settings):
    kind: Literal["text"] = "text"
    corpus: CorpusConfig
    context: int = Field(ge=1)
    evaluation_windows: int = Field(ge=1)
    """Held-out windows of `context` tokens, evenly spaced over the split."""


class Text:
    """Next-byte prediction on a corpus: inputs and targets [B, T]."""

    def __init__(self, config: TextConfig) -> None:
        self.config = config
        self.corpus = Corpus(config.corpus)
        for name, part in self.corpus.splits.items():
            if len(part) <= config.context:
                raise UserError(
                    f"corpus {config.corpus.source}: too short; its {name} split has {len(part)} bytes, and a "
                    f"context of {config.context} needs at least {config.context + 1}; use a longer text"
                )

    def _windows(self, text: NDArray[np.uint8], starts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        window = text[starts[:, None] + np.arange(self.config.context + 1)].astype(np.int64)
        tokens = torch.from_numpy(window)
        return tokens[:, :-1], tokens[:, 1:]

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        text = self.corpus.splits["train"]
        starts = np.random.default_rng([seed, step]).integers(0, len(text) - self.config.context, size)
        return self._windows(text, starts)

    def held_out(self, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
        text = self.corpus.splits[split]
        last = len(text) - self.config.context - 1
        starts = np.unique(np.linspace(0, last, self.config.evaluation_windows).astype(np.int64))
        for at in range(0, len(starts), 32):
            yield self._windows(text, starts[at : at + 32])

    def context_free_loss(self, split: Split) -> float:
        """Cross entropy in nats of the split's windows under the training split's byte frequencies."""
        logs = self.corpus.unigram()
        losses = [-logs[targets.numpy()] for _, targets in self.held_out(split)]
        return float(np.concatenate(losses).mean())


# --- a task that needs depth ----------------------------------------------------------------------


class HopsConfig(Settings):
    kind: Literal["hops"] = "hops"
    symbols: int = Field(default=6, ge=2)
    """n, entries of the table."""
    queries: int = Field(default=10, ge=1)
    """m, symbols to follow through the table."""
    hops: int = Field(ge=1)
    """k, how many times each is looked up."""

    @property
    def context(self) -> int:
        return self.symbols + self.queries

    @property
    def vocabulary(self) -> int:
        """Entries of the table and symbols asked for are different tokens."""
        return 2 * self.symbols


class Hops:
    """Pointer chasing: a table f(0) ... f(n - 1), a random permutation, then symbols x; the target at x is f^k(x).

    Inputs and targets [B, n + m]; nothing is asked for in the table. One attention layer looks up once; f^k takes
    k of them in a row, or about log2 k where the table is composed with itself (k-hop induction: Sanford et al. 2024,
    arXiv 2402.09268). Tables and symbols are new in every batch, so that nothing can be learnt by heart.
    """

    HELD_OUT = 256
    """Examples of a held-out split."""

    def __init__(self, config: HopsConfig) -> None:
        self.config = config

    def _draw(self, random: np.random.Generator, size: int) -> tuple[Tensor, Tensor]:
        n = self.config.symbols
        table = random.permuted(np.tile(np.arange(n), (size, 1)), axis=1)
        asked = random.integers(0, n, (size, self.config.queries))
        found = asked
        for _ in range(self.config.hops):
            found = np.take_along_axis(table, found, 1)
        targets = np.concatenate([np.full_like(table, NOT_ASKED), found], 1)
        return torch.from_numpy(np.concatenate([table, asked + n], 1)), torch.from_numpy(targets)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        return self._draw(np.random.default_rng([seed, step]), size)

    def held_out(self, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
        yield self._draw(np.random.default_rng([0, 0, len(split)]), self.HELD_OUT)

    def context_free_loss(self, split: Split) -> float:
        """ln n: without the table all symbols are equally likely."""
        return float(np.log(self.config.symbols))


# --- a task that needs memory ---------------------------------------------------------------------


class RecallConfig(Settings):
    kind: Literal["recall"] = "recall"
    symbols: int = Field(default=8, ge=2)
    """n, what there is to remember."""
    distractors: int = Field(default=8, ge=1)
    """Different tokens that come in between; none of them is a symbol."""
    length: int = Field(ge=1)
    """T, how many distractors come between the symbol and the question."""

    @property
    def context(self) -> int:
        return self.length + 2

    @property
    def vocabulary(self) -> int:
        """Symbols, distractors, and the question."""
        return self.symbols + self.distractors + 1


class Recall:
    """Remember what came first: a symbol, T random distractors, the question; the target at the question is the symbol.

    Inputs and targets [B, T + 2]; nothing else is asked for. The latching problem of Bengio et al. 1994 ("Learning
    long-term dependencies with gradient descent is difficult") with symbols. No distractor says anything about it, so
    that what is right above one in n was carried over T tokens.
    """

    HELD_OUT = 256
    """Examples of a held-out split."""

    def __init__(self, config: RecallConfig) -> None:
        self.config = config

    def _draw(self, random: np.random.Generator, size: int) -> tuple[Tensor, Tensor]:
        n, m = self.config.symbols, self.config.distractors
        symbol = random.integers(0, n, (size, 1))
        between = random.integers(n, n + m, (size, self.config.length))
        inputs = np.concatenate([symbol, between, np.full_like(symbol, n + m)], 1)
        targets = np.full_like(inputs, NOT_ASKED)
        targets[:, -1:] = symbol
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        return self._draw(np.random.default_rng([seed, step]), size)

    def held_out(self, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
        yield self._draw(np.random.default_rng([0, 0, len(split)]), self.HELD_OUT)

    def context_free_loss(self, split: Split) -> float:
        """ln n: without the first token all symbols are equally likely."""
        return float(np.log(self.config.symbols))


# --- images ---------------------------------------------------------------------------------------


DIGITS_FOR_TRAINING = 1197
"""Of the 1797, with 300 for validation and 300 for testing."""


class DigitsConfig(Settings):
    kind: Literal["digits"] = "digits"


class Digits:
    """Scikit-learn's 1797 handwritten digits: inputs [B, 1, 8, 8] in [-1, 1], targets [B] in 0..9."""

    def __init__(self, config: DigitsConfig) -> None:
        from sklearn.datasets import load_digits

        images, classes = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(classes))
        pixels = (images[order].reshape(-1, 1, 8, 8) / 8 - 1).astype(np.float32)
        self.images, self.classes = (
            torch.from_numpy(pixels),
            torch.from_numpy(classes[order].astype(np.int64)),
        )
        self.ranges = {
            "validation": range(0, 300),
            "test": range(300, 600),
            "train": range(600, len(classes)),
        }

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        train = self.ranges["train"]
        if size > len(train):
            raise UserError(f"digits: a batch of {size} is larger than the {len(train)} training images; lower it")
        chosen = np.random.default_rng([seed, step]).choice(len(train), size, replace=False) + train.start
        return self.images[chosen], self.classes[chosen]

    def held_out(self, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
        part = slice(self.ranges[split].start, self.ranges[split].stop)
        yield self.images[part], self.classes[part]

    def context_free_loss(self, split: Split) -> float:
        """ln 10: the ten digits are equally frequent."""
        return float(np.log(10))


class _DerivedDigits:
    """A task made from the digits by drawing something for each image: masks or noise.

    What is drawn for a batch depends on seed and step; for a held-out split, on the split alone.
    """

    def __init__(self) -> None:
        self.digits = Digits(DigitsConfig())

    def draw(self, images: Tensor, classes: Tensor, random: np.random.Generator) -> Batch:
        """Inputs and targets of images [B, 1, 8, 8] with classes [B]."""
        raise NotImplementedError

    def batch(self, seed: int, step: int, size: int) -> Batch:
        return self.draw(*self.digits.batch(seed, step, size), np.random.default_rng([seed, step, 1]))

    def held_out(self, split: Split) -> Iterator[Batch]:
        for images, classes in self.digits.held_out(split):
            yield self.draw(images, classes, np.random.default_rng([0, len(split)]))


class MaskedDigitsConfig(Settings):
    kind: Literal["masked_digits"] = "masked_digits"
    patch: int = Field(default=2, ge=1)
    """Height and width in pixels of what is masked at once; that of the model."""
    fraction: float = Field(default=0.5, gt=0, lt=1)
    """Of the patches of an image, how many are masked."""

    @model_validator(mode="after")
    def _patch_divides_image(self) -> "MaskedDigitsConfig":
        if self.patch not in (1, 2, 4):
            raise ValueError(f"patch {self.patch} does not divide the digits' 8 pixels; use 1, 2 or 4")
        return self


class MaskedDigits(_DerivedDigits):
    """Masked autoencoding: inputs images [B, 1, 8, 8] and masked [B, N]; targets the masked pixels, else NaN.

    He et al. 2022, arXiv 2111.06377: the loss is on what was masked.
    """

    def __init__(self, config: MaskedDigitsConfig) -> None:
        super().__init__()
        self.patch, self.side = config.patch, 8 // config.patch
        self.masked = max(1, round(config.fraction * self.side**2))

    def draw(self, images: Tensor, classes: Tensor, random: np.random.Generator) -> Batch:
        ranks = random.random((len(images), self.side**2)).argsort(-1)
        masked = torch.from_numpy(ranks < self.masked)
        grid = masked.unflatten(-1, (1, self.side, self.side))
        pixels = grid.repeat_interleave(self.patch, -1).repeat_interleave(self.patch, -2)
        return (images, masked), torch.where(pixels, images, torch.nan)

    def context_free_loss(self, split: Split) -> float:
        """Mean square error of the training images' mean."""
        train = self.digits.ranges["train"]
        mean = self.digits.images[train.start : train.stop].mean(0)
        errors = torch.cat([(targets - mean).square() for _, targets in self.held_out(split)])
        return float(errors[~errors.isnan()].mean())


class NoisyDigitsConfig(Settings):
    kind: Literal["noisy_digits"] = "noisy_digits"
    labels: bool = True
    """Models are told which digit it is."""


class NoisyDigits(_DerivedDigits):
    """Denoising diffusion: inputs noisy images [B, 1, 8, 8], time [B] in 0..1, classes [B]; targets the noise.

    x_t = sqrt(c) x + sqrt(1 - c) noise with c = cos^2(pi t / 2) (Ho et al. 2020, arXiv 2006.11239, eq. 4; the
    schedule of Nichol & Dhariwal 2021, arXiv 2102.09672, without its offset).
    """

    def __init__(self, config: NoisyDigitsConfig) -> None:
        super().__init__()
        self.labels = config.labels

    def draw(self, images: Tensor, classes: Tensor, random: np.random.Generator) -> Batch:
        time = torch.from_numpy(random.random(len(images), dtype=np.float32))
        noise = torch.from_numpy(random.standard_normal(images.shape, dtype=np.float32))
        angle = (torch.pi / 2 * time).view(-1, 1, 1, 1)
        noisy = angle.cos() * images + angle.sin() * noise
        return (noisy, time, classes) if self.labels else (noisy, time), noise

    def context_free_loss(self, split: Split) -> float:
        """That of guessing no noise: 1 in expectation."""
        return float(torch.cat([noise for _, noise in self.held_out(split)]).square().mean())


TaskConfig = TextConfig | HopsConfig | RecallConfig | DigitsConfig | MaskedDigitsConfig | NoisyDigitsConfig


@cache
def load(config: TaskConfig) -> Task:
    """The task that `config` describes; read and checked once a process."""
    if isinstance(config, TextConfig):
        return Text(config)
    if isinstance(config, HopsConfig):
        return Hops(config)
    if isinstance(config, RecallConfig):
        return Recall(config)
    if isinstance(config, DigitsConfig):
        return Digits(config)
    return MaskedDigits(config) if isinstance(config, MaskedDigitsConfig) else NoisyDigits(config)
