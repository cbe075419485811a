"""Files as their publishers offer them, as the arrays that `real` reads. Nothing is ever unpickled.

Each function takes the files of a dataset by name (a Hugging Face dataset as it was loaded) and returns the
arrays of its archive; downloading is the business of `sources`.
"""

from __future__ import annotations

import csv
import gzip
import html
import io
import re
import tarfile
import wave
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core import check, draws

Arrays = dict[str, NDArray[Any]]
Files = Mapping[str, Path]

WORDS, LENGTH = 10_000, 128  # of imdb: size of the vocabulary, words of a review
SHORTEST = 200  # characters of a role of Shakespeare's
SIDE = 32  # of an image of speech: bands and frames
CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
HEART = [
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
]
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
SCORES = ("motor_UPDRS", "total_UPDRS")


def mnist(files: Files) -> Arrays:
    """Join MNIST's digits with the writers that QMNIST knows of them, in the same order."""
    arrays: Arrays = {}
    for part, theirs in (("train", "train"), ("test", "t10k")):
        x = _idx(files[f"{theirs}-images-idx3-ubyte.gz"])
        y = _idx(files[f"{theirs}-labels-idx1-ubyte.gz"])
        about = _idx(files[f"qmnist-{part}-labels-idx2-int.gz"])[: len(y)]
        if len(x) != len(y) or not np.array_equal(about[:, 0], y):
            raise _wrong(files[f"qmnist-{part}-labels-idx2-int.gz"], "the labels of MNIST in its order")
        arrays |= {f"x_{part}": x, f"y_{part}": y}
        arrays |= {
            f"writer_{part}": about[:, 2].astype(np.int16),
            f"hsf_{part}": about[:, 1].astype(np.uint8),
        }
    return arrays


def cifar10(files: Files) -> Arrays:
    """Read the binary version: a label and 3 × 32 × 32 colours for each image."""
    parts: dict[str, list[NDArray[np.uint8]]] = {"train": [], "test": []}
    names: list[str] = []
    path = files["cifar-10-binary.tar.gz"]
    for name, content in sorted(_members(path)):
        if name.endswith("batches.meta.txt"):
            names = content.decode().split()
        elif name.endswith(".bin"):
            part = "test" if "test" in name else "train"
            if len(content) % 3073:
                raise _wrong(path, f"records of 3073 bytes in {name}")
            parts[part].append(np.frombuffer(content, np.uint8).reshape(-1, 3073))
    if not all(parts.values()):
        raise _wrong(path, "batches for training and testing")
    arrays: Arrays = {"class_name": np.array(names)} if names else {}
    for part, blocks in parts.items():
        rows = np.concatenate(blocks)
        x = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays |= {f"x_{part}": np.ascontiguousarray(x), f"y_{part}": rows[:, 0].copy()}
    return arrays


def femnist(dataset: Any) -> Arrays:
    """Take images, writers and characters of a Hugging Face dataset; a tenth of each writer's is for testing.

    Ink is bright and paper is 0, as in MNIST.
    """
    writers, writer = np.unique(np.asarray(dataset["writer_id"]).astype(str), return_inverse=True)
    y = np.asarray(dataset["character"], dtype=np.uint8)
    x = np.stack([np.asarray(image, dtype=np.uint8) for image in dataset["image"]])
    if len(x) and x[:, 0].mean() > 127:  # the upper rim is paper
        x = 255 - x
    order = np.argsort(writer, kind="stable")
    x, y, writer = x[order], y[order], writer[order]
    is_test = np.zeros(len(y), dtype=np.bool_)
    starts = np.searchsorted(writer, np.arange(len(writers) + 1))
    for i, (start, end) in enumerate(pairwise(starts.tolist())):
        drawn = draws.generator(0, "femnist-test", i).permutation(end - start)
        is_test[start + drawn[: round(0.1 * (end - start))]] = True
    return {
        "x": x,
        "y": y,
        "writer": writer.astype(np.int16),
        "is_test": is_test,
        "writer_name": writers,
        "class_name": np.array(list(CLASSES)),
    }


def free_spoken_digits(files: Files) -> Arrays:
    """Turn recordings DIGIT_SPEAKER_REPETITION.wav into log-mel images of 32 bands and 32 frames."""
    path = next(iter(files.values()))
    recordings = []
    for name, content in _members(path):
        match = re.search(r"recordings/(\d)_([a-z]+)_(\d+)\.wav$", name)
        if match:
            recordings.append((int(match[1]), match[2], int(match[3]), content))
    if not recordings:
        raise _wrong(path, "recordings such as recordings/0_jackson_0.wav")
    recordings.sort(key=lambda r: r[:3])
    speakers, speaker = np.unique([r[1] for r in recordings], return_inverse=True)
    return {
        "x": np.stack([_log_mel(*_sound(content)) for *_, content in recordings]),
        "y": np.array([r[0] for r in recordings], dtype=np.uint8),
        "speaker": speaker.astype(np.int16),
        "repetition": np.array([r[2] for r in recordings], dtype=np.uint8),
        "speaker_name": speakers,
    }


def shakespeare(files: Files) -> Arrays:
    """Collect the lines of each role in each play of the MIT edition, in their order."""
    path = next(iter(files.values()))
    spoken: dict[tuple[str, str], list[str]] = {}
    for name, content in sorted(_members(path)):
        match = re.fullmatch(r"[^/]+/([^/]+)/full\.html", name)  # copies in deeper folders are left out
        if match:
            for role, lines in _speeches(content.decode("latin-1")):
                spoken.setdefault((match[1], role), []).extend(lines)
    texts = {key: "".join(f"{line}\n" for line in lines) for key, lines in spoken.items()}
    texts = {key: t for key, t in texts.items() if len(t) >= SHORTEST and key[1] not in ("ALL", "BOTH")}
    if not texts:
        raise _wrong(path, "plays as PLAY/full.html")
    roles = sorted(texts)
    plays, play = np.unique([p for p, _ in roles], return_inverse=True)
    text = np.frombuffer("".join(texts[key] for key in roles).encode("ascii", "replace"), np.uint8)
    return {
        "text": text,
        "offset": np.cumsum([0, *(len(texts[key]) for key in roles)], dtype=np.int64),
        "role": np.array([role for _, role in roles]),
        "play": play.astype(np.int16),
        "play_name": plays,
        "alphabet": np.unique(text),
    }


def imdb(files: Files) -> Arrays:
    """Turn reviews into the ids of their first words; 0 pads, 1 is a word that is not among the commonest."""
    path = files["aclImdb_v1.tar.gz"]
    reviews: list[tuple[bool, bool, int, int, list[str]]] = []  # is_test, positive, number, rating, words
    movies: dict[tuple[str, str], list[str]] = {}
    for name, content in _members(path):
        if match := re.search(r"(train|test)/(pos|neg)/(\d+)_(\d+)\.txt$", name):
            words = re.findall(r"[a-z0-9]+(?:'[a-z]+)?", content.decode().lower().replace("<br />", " "))
            reviews.append((match[1] == "test", match[2] == "pos", int(match[3]), int(match[4]), words))
        elif match := re.search(r"(train|test)/urls_(pos|neg)\.txt$", name):
            movies[match[1], match[2]] = re.findall(r"tt\d+", content.decode())
    if not reviews or len(movies) != 4:
        raise _wrong(path, "reviews such as train/pos/0_9.txt, and the movies in train/urls_pos.txt")
    reviews.sort(key=lambda r: r[:3])
    counts = Counter(word for review in reviews if not review[0] for word in review[4])
    vocabulary = ["<pad>", "<unk>", *(w for w, _ in sorted(counts.items(), key=lambda c: (-c[1], c[0])))][
        :WORDS
    ]
    place = {word: i for i, word in enumerate(vocabulary)}
    x = np.zeros((len(reviews), LENGTH), dtype=np.uint16)
    for row, review in zip(x, reviews):
        ids = [place.get(word, 1) for word in review[4][:LENGTH]]
        row[: len(ids)] = ids
    of = [movies["test" if r[0] else "train", "pos" if r[1] else "neg"][r[2]] for r in reviews]
    known, movie = np.unique(of, return_inverse=True)
    return {
        "x": x,
        "y": np.array([r[1] for r in reviews], dtype=np.uint8),
        "rating": np.array([r[3] for r in reviews], dtype=np.uint8),
        "movie": movie.astype(np.int32),
        "is_test": np.array([r[0] for r in reviews]),
        "vocab": np.array(vocabulary),
        "movie_imdb_id": known,
    }


def parkinsons_telemonitoring(files: Files) -> Arrays:
    """Read the table: the patient, two scores to predict, and 19 features."""
    path = next(iter(files.values()))
    table = next((text for name, text in _members(path) if name.endswith("parkinsons_updrs.data")), None)
    if table is None:
        raise _wrong(path, "the file parkinsons_updrs.data")
    header, *rows = csv.reader(io.StringIO(table.decode()))
    if header[0] != "subject#" or not set(SCORES) <= set(header):
        raise _wrong(path, f"the columns subject#, {', '.join(SCORES)}")
    values = np.array(rows, dtype=np.float64)
    features = [name for name in header[1:] if name not in SCORES]
    return {
        "x": values[:, [header.index(name) for name in features]].astype(np.float32),
        "y": values[:, [header.index(name) for name in SCORES]].astype(np.float32),
        "subject": values[:, 0].astype(np.int16),
        "feature_name": np.array(features),
    }


def heart_disease(files: Files) -> Arrays:
    """Join the processed tables of four hospitals; what is missing ('?') is NaN."""
    path = next(iter(files.values()))
    tables = dict(_members(path))
    blocks = []
    for hospital in HOSPITALS:
        name = f"processed.{hospital}.data"
        content = next((text for place, text in tables.items() if Path(place).name == name), None)
        if content is None:
            raise _wrong(path, f"the file {name}")
        rows = csv.reader(io.StringIO(content.decode("latin-1")))
        blocks.append([[float("nan") if v == "?" else float(v) for v in row] for row in rows if row])
    values = np.array([row for block in blocks for row in block], dtype=np.float32)
    if values.ndim != 2 or values.shape[1] != len(HEART) + 1:
        raise _wrong(path, f"tables of {len(HEART) + 1} columns")
    severity = values[:, -1].astype(np.uint8)
    return {
        "x": values[:, :-1],
        "y": (severity > 0).astype(np.uint8),
        "severity": severity,
        "hospital": np.repeat(np.arange(4), [len(block) for block in blocks]).astype(np.int16),
        "hospital_name": np.array(HOSPITALS),
        "feature_name": np.array(HEART),
    }


# ---- files


def _idx(path: Path) -> NDArray[Any]:
    """Read an array in the format of MNIST: its type, its number of axes, their lengths, its numbers."""
    content = gzip.decompress(path.read_bytes())
    types = {0x08: "u1", 0x0C: ">i4"}
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in types:
        raise _wrong(path, "an array in the format idx")
    axes = content[3]
    shape = np.frombuffer(content, ">i4", axes, offset=4)
    values = np.frombuffer(content, types[content[2]], offset=4 + 4 * axes)
    if values.size != np.prod(shape):
        raise _wrong(path, f"{np.prod(shape)} numbers, not {values.size}")
    native: NDArray[Any] = values.reshape(shape).astype(values.dtype.newbyteorder("="))
    return native


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an archive with their contents."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    yield info.filename, archive.read(info)
        return
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                if member.isfile() and (opened := tar.extractfile(member)):
                    yield member.name, opened.read()
    except tarfile.TarError as error:
        raise _wrong(path, f"an archive (.zip or .tar.gz) that is whole ({error})") from None


def _wrong(path: Path, allowed: str) -> ValueError:
    return check.fail("file", str(path), allowed)


# ---- speech and speeches


def _sound(content: bytes) -> tuple[NDArray[np.float64], int]:
    """Return the samples of a mono recording in [−1, 1], and how many there are in a second."""
    with wave.open(io.BytesIO(content)) as recording:
        rate, width = recording.getframerate(), recording.getsampwidth()
        samples = np.frombuffer(recording.readframes(recording.getnframes()), f"<i{width}")
    return samples / float(1 << (8 * width - 1)), rate


def _log_mel(samples: NDArray[np.float64], rate: int) -> NDArray[np.uint8]:
    """Return a recording as an image: bands from low to high, frames in the middle, 80 dB as 0 to 255."""
    size, step = round(0.032 * rate), round(0.025 * rate)
    padded = np.pad(samples, (0, max(0, size - len(samples))))
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::step] * np.hanning(size)
    power = np.abs(np.fft.rfft(frames)) ** 2 @ _bands(size, rate).T
    loud = 10 * np.log10(np.maximum(power, 1e-10))
    image = np.clip((loud - loud.max() + 80) / 80 * 255, 0, 255).round().astype(np.uint8).T
    image = image[:, max(0, (image.shape[1] - SIDE) // 2) :][:, :SIDE]
    left = (SIDE - image.shape[1]) // 2
    return np.pad(image, ((0, 0), (left, SIDE - image.shape[1] - left)))


def _bands(size: int, rate: int) -> NDArray[np.float64]:
    """Return the weights of frequencies in triangular bands, equally wide on the mel scale."""
    highest = 2595 * np.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, highest, SIDE + 2) / 2595) - 1)
    frequencies = np.fft.rfftfreq(size, 1 / rate)
    low, middle, high = (edges[i : i + SIDE, None] for i in range(3))
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    # a band between two frequencies takes the nearest one
    nearest = np.abs(frequencies - middle).argmin(1)[:, None] == np.arange(len(frequencies))
    weights: NDArray[np.float64] = np.maximum(np.minimum(rising, falling), nearest)
    return np.maximum(weights, 0)


def _speeches(page: str) -> Iterable[tuple[str, list[str]]]:
    """Yield who speaks, and the lines, without stage directions."""
    speech = re.compile(r"<A NAME=speech\d+><b>(.*?)</b></a>(.*?)(?=<A NAME=speech\d+>|\Z)", re.S | re.I)
    line = re.compile(r"<A NAME=[\d.]+>(.*?)</A>", re.S | re.I)
    for role, block in speech.findall(page):
        lines = [html.unescape(re.sub(r"<[^>]*>", "", text)) for text in line.findall(block)]
        yield html.unescape(role).strip().upper(), [" ".join(text.split()) for text in lines]
