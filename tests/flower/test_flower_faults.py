"""Who lies, who differs and who is not on the roster: each is named, and changes nothing for the others."""

from __future__ import annotations

import contextlib
import functools
import http.client
import ssl
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import small_experiment
import torch
from federation import HERE, Federation, until
from safetensors.torch import load_file

import partita as pt
from partita.core.types import Tensors
from partita.deploy import Client
from partita.deploy import keys as deployed

pytestmark = pytest.mark.slow

SET = {"set": "rounds=4"}
WORDS = ("--set", "rounds=4")


@functools.cache
def without_b() -> dict[str, Tensors]:
    """The models of the others, where b's uploads are never used."""
    experiment = small_experiment.experiment("fedalt", 4)
    attacked = replace(
        experiment, data=small_experiment.everyone(), attack=pt.attack.nonfinite(), byzantine=[1]
    )
    run = attacked.run(executor="loop", device="cpu", baselines=False, progress=False)
    return {name: run.client(i).model("personal").state_dict() for i, name in enumerate("abc")}


def test_replies_that_are_wrong(federation: Federation) -> None:
    """NaN, random bytes, a pickle, and 64 MB where 17 kB are due: the others train as if b were not there."""
    for name in "ac":
        federation.client(name, *WORDS)
    state = federation.test / "state-b"
    state.mkdir()
    words = [sys.executable, str(HERE / "liar.py"), "b", str(federation.socket("b")), str(state)]
    words += ["nan", "garbage", "pickle", "oversize"]
    federation.clients["b"] = federation.start("client-b", *words, home=federation.test)
    until(federation.socket("b").exists)
    federation.train(**SET)
    server, most = Path(f"/proc/{federation.server_app()}/status"), 0
    while federation.server_app():
        with contextlib.suppress(OSError, IndexError):
            most = max(most, int(server.read_text().partition("VmHWM:")[2].split()[0]))
        time.sleep(0.2)
    federation.ends()
    said = federation.said()
    print(f"memory of the server: at most {most / 1024:.0f} MB")
    for reason in ("client b: not finite", "header", "too large, or broken"):
        assert reason in said, said
    assert not (state / "unpickled").exists()
    for name in "ac":
        made = small_experiment.experiment("fedalt", 4)
        one = Client(made, name, small_experiment.data(name), federation.test / f"state-{name}")
        model = load_file(one.export(federation.test / f"{name}.safetensors"))
        for key, value in without_b()[name].items():
            assert torch.equal(model[key], value), (name, key)


def test_another_experiment_is_named(federation: Federation) -> None:
    for name in "abc":
        federation.client(name, *WORDS, *(("--set", "width=32") if name == "b" else ()))
    federation.train(**SET, enrolment="90s")
    federation.ends("finished:failed")
    said = federation.said()
    assert "b: another experiment: it differs in its" in said, said
    assert not (federation.out / "checkpoint").exists()


def test_a_supernode_that_nobody_knows(federation: Federation) -> None:
    """The SuperLink refuses a key that is not registered; one that is not on the roster is not asked."""
    federation.key("stranger")
    stranger = federation.node("stranger")
    assert stranger.wait(60) != 0
    said = federation.flwr("supernode", "register", str(federation.folder / "stranger.pub"), "here")
    federation.node("stranger")
    until(lambda: str(said["node-id"]) in federation.log("node-stranger"))
    for name in "abc":
        federation.client(name, *WORDS)
    federation.train(set="rounds=1")
    for process in federation.clients.values():
        assert process.poll() is None
    until(lambda: "which is not on the roster" in federation.said())
    federation.stop()
    assert "Receiving" not in federation.log("node-stranger")
    federation.long["node-stranger"].terminate()


def test_a_superlink_of_another_authority_is_not_trusted(federation: Federation, tmp_path: Path) -> None:
    deployed.make(tmp_path / "others", ["x"])
    federation.key("careful")
    authority = tmp_path / "others" / "server" / "ca.crt"
    node = federation.node("careful", authority=authority)
    until(lambda: "CERTIFICATE_VERIFY_FAILED" in federation.log("node-careful") or node.poll() is not None)
    assert "SuperNode ID" not in federation.log("node-careful")


def test_the_gate_lets_nobody_start_a_run(federation: Federation) -> None:
    """Through the gate SuperNodes work; the control of the SuperLink is not reached."""
    with pytest.raises(AssertionError):
        federation.train(superlink="gate")
    assert federation.run == ""
    context = ssl.create_default_context(cafile=federation.keys / "ca.crt")
    for port, expected in ((federation.port, 200), (federation.gate.port, 403)):
        link = http.client.HTTPSConnection("127.0.0.1", port, context=context)
        link.request("POST", "/v1/control/list-runs", b"", {"content-type": "application/protobuf"})
        assert link.getresponse().status == expected
