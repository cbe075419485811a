"""Small files in the forms in which the publishers of real datasets offer them."""

from __future__ import annotations

import gzip
import io
import tarfile
import wave
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

RNG = np.random.default_rng(0)


def zipped(path: Path, members: Mapping[str, bytes | str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def tarred(path: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def idx(path: Path, values: np.ndarray) -> Path:
    kind = {1: 0x08, 4: 0x0C}[values.dtype.itemsize]
    head = bytes([0, 0, kind, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(head + values.astype(values.dtype.newbyteorder(">")).tobytes()))
    return path


def mnist(folder: Path) -> None:
    """Forty digits of four writers to train on, and six to test on: QMNIST knows more of these."""
    for part, theirs, n, known in (("train", "train", 40, 40), ("test", "t10k", 6, 9)):
        y = (np.arange(n) % 10).astype(np.uint8)
        about = np.zeros((known, 8), np.int32)
        about[:n, 0], about[:, 1], about[:, 2] = y, 4, 300 + np.arange(known) // 10
        idx(folder / f"{theirs}-images-idx3-ubyte.gz", RNG.integers(0, 256, (n, 28, 28)).astype(np.uint8))
        idx(folder / f"{theirs}-labels-idx1-ubyte.gz", y)
        idx(folder / f"qmnist-{part}-labels-idx2-int.gz", about)


def cifar10(folder: Path) -> None:
    def batch(n: int) -> bytes:
        rows = RNG.integers(0, 256, (n, 3073)).astype(np.uint8)
        rows[:, 0] = np.arange(n) % 10
        return rows.tobytes()

    root = "cifar-10-batches-bin/"
    members = {f"{root}data_batch_{i}.bin": batch(20) for i in (2, 1)}
    members |= {f"{root}test_batch.bin": batch(10), f"{root}batches.meta.txt": b"airplane\nautomobile\n\n"}
    tarred(folder / "cifar-10-binary.tar.gz", members)


def free_spoken_digits(folder: Path) -> None:
    """A tone for each digit, higher ones for larger digits."""
    members: dict[str, bytes] = {"free-spoken-digit-dataset-master/README.md": b"none"}
    for digit in range(3):
        for speaker, seconds in (("theo", 0.3), ("jackson", 1.2)):
            for repetition in range(7):
                time = np.arange(int(8000 * seconds)) / 8000
                tone = (20000 * np.sin(2 * np.pi * 400 * 2**digit * time)).astype("<i2")
                content = io.BytesIO()
                with wave.open(content, "wb") as out:
                    out.setnchannels(1), out.setsampwidth(2), out.setframerate(8000)
                    out.writeframes(tone.tobytes())
                name = f"free-spoken-digit-dataset-master/recordings/{digit}_{speaker}_{repetition}.wav"
                members[name] = content.getvalue()
    zipped(folder / "master.zip", members)


def shakespeare(folder: Path) -> None:
    def speech(number: int, role: str, *lines: str) -> str:
        said = "".join(f"<A NAME=1.1.{i}>{line}</A><br>\n" for i, line in enumerate(lines))
        return (
            f"<A NAME=speech{number}><b>{role}</b></a>\n<blockquote>\n{said}<p><i>Exit</i></p></blockquote>\n"
        )

    king = [f"Line {i} of the king &amp; his <i>court</i>," for i in range(40)]
    play = "<html>" + speech(1, "KING", *king[:20]) + speech(2, "Page", "Ay.") + speech(3, "King", *king[20:])
    members = {"s-master/hamlet/full.html": play, "s-master/lear/full.html": play.replace("Line", "Word")}
    members |= {"s-master/Tragedy/hamlet/full.html": play, "s-master/hamlet/hamlet.1.1.html": play}
    members["s-master/lear/full.html"] += speech(4, "ALL", *king)
    zipped(folder / "master.zip", members)


def imdb(folder: Path) -> None:
    members: dict[str, bytes] = {}
    for part in ("train", "test"):
        for kind, rating in (("pos", 9), ("neg", 2)):
            urls = [f"http://www.imdb.com/title/tt{i // 3:07d}/usercomments" for i in range(6)]
            members[f"aclImdb/{part}/urls_{kind}.txt"] = "\n".join(urls).encode()
            for i in range(6):
                text = f"It's<br />a {kind} Movie, {part if part == 'test' else 'good'}! " + "the " * (i * 30)
                members[f"aclImdb/{part}/{kind}/{i}_{rating}.txt"] = text.encode()
    tarred(folder / "aclImdb_v1.tar.gz", members)


def parkinsons_telemonitoring(folder: Path) -> None:
    header = "subject#,age,sex,test_time,motor_UPDRS,total_UPDRS,Jitter(%)"
    rows = [f"{1 + i // 5},{60 + i},{i % 2},{i}.5,{20 + i}.25,{30 + i}.5,0.00{i}" for i in range(15)]
    zipped(folder / "parkinsons+telemonitoring.zip", {"parkinsons_updrs.data": "\n".join([header, *rows])})


def heart_disease(folder: Path) -> None:
    members = {"heart-disease.names": "about"}
    for k, hospital in enumerate(("cleveland", "hungarian", "switzerland", "va")):
        rows = [f"{60 + i},1,{k},140,{200 + i},?,0,150,0,1.5,2,?,3,{i % 5}" for i in range(5 + k)]
        members[f"processed.{hospital}.data"] = "\n".join(rows) + "\n"
    zipped(folder / "heart+disease.zip", members)
