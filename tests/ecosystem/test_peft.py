"""Adapters of peft: which tensors they are, what is sent, ranks of devices, and models that are saved."""

from __future__ import annotations

import copy
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import partita as pt
from partita.algorithms.partition import personal_names
from support import each

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, SIZES = 31, 10, (6, 9, 7)
RANK, LR, STEPS, ROUNDS = 4, 0.5, 2, 3
Tensors = dict[str, Tensor]


def text() -> pt.data.FederatedData:
    """Token ids of several lengths: what follows the end is padding, which no loss counts."""
    draw = np.random.default_rng(0)
    n, client = sum(SIZES), np.repeat(np.arange(len(SIZES)), SIZES)
    ids = draw.integers(3, VOCABULARY, (n, LENGTH))
    real = np.arange(LENGTH) < draw.integers(LENGTH // 2, LENGTH + 1, n)[:, None]
    x = {"input_ids": np.where(real, ids, 0), "attention_mask": real.astype(np.int64)}
    test = np.concatenate([np.arange(size) < 2 for size in SIZES])
    return pt.data.from_arrays(x, np.where(real, ids, -100), client, test=test, validation=0)


def base(kind: str = "LlamaForCausalLM") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=3,
    )
    return getattr(transformers, kind)(config)  # type: ignore[no-any-return]


def adapted(config: Any = None, kind: str = "LlamaForCausalLM") -> Any:
    """A model of peft whose B is not zero, as after some training."""
    config = config or peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=RANK, lora_alpha=6
    )
    model = peft.get_peft_model(base(kind), config)
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.2)
    return model


def federate(model: nn.Module, method: Any, **options: Any) -> pt.Run:
    """Full batches: nothing is random."""
    settings = {"rounds": ROUNDS, "steps": STEPS, "batch": None, "baselines": False, "progress": False}
    settings |= {"loss": "model", "metric": "perplexity", "executor": "loop"}
    return pt.federate(model, text(), method, **{**settings, **options})


# ---- which tensors


TUNERS = {
    "lora": (lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]), "LlamaForCausalLM"),
    "dora": (
        lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], use_dora=True),
        "LlamaForCausalLM",
    ),
    "lora of embeddings": (
        lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["embed_tokens"]),
        "LlamaForCausalLM",
    ),
    "loha": (lambda: peft.LoHaConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]), "LlamaForCausalLM"),
    "ia3": (
        lambda: peft.IA3Config(
            task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        "LlamaForCausalLM",
    ),
    "prompts": (
        lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "LlamaForCausalLM",
    ),
    "prefixes": (
        lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "LlamaForCausalLM",
    ),
    "adaption prompts": (
        lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1),
        "LlamaForCausalLM",
    ),
    "lora and a head": (
        lambda: peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]),
        "LlamaForSequenceClassification",
    ),
}


@each("tuner", TUNERS)
def test_adapters_are_what_is_trained_but_for_whole_layers(tuner: str) -> None:
    config, kind = TUNERS[tuner]
    model = adapted(config(), kind)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    found = personal_names(model, trained, "adapter")
    assert found
    assert set(found) == {name for name in trained if "modules_to_save" not in name}
    everything = [name for name, _ in model.named_parameters()]
    assert set(personal_names(model, everything, "adapter")) == set(found)  # and nothing of the base


def test_adapters_that_were_put_into_a_model() -> None:
    model = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), base())
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert set(personal_names(model, trained, "adapter")) == set(trained)


# ---- the methods, beside a loop of peft's own model and torch's own optimizer


def client_steps(model: nn.Module, tensors: Tensors, client: int) -> Tensors:
    model.load_state_dict(tensors, strict=False)
    x, y = text().client(client, "train")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**x, labels=y).loss.backward()
        optimizer.step()
    return {k: p.detach().clone() for k, p in model.named_parameters() if p.requires_grad}


def plainly(model: nn.Module, personal: str) -> tuple[Tensors, list[Tensors]]:
    model = copy.deepcopy(model).train()
    server = {k: p.detach().clone() for k, p in model.named_parameters() if p.requires_grad}
    own = [dict(server) for _ in SIZES]
    weight = [size - 2 for size in SIZES]
    for _ in range(ROUNDS):
        for client in range(len(SIZES)):
            start = {k: own[client][k] if personal in k else v for k, v in server.items()}
            own[client] = client_steps(model, start, client)
        server = {k: sum(n * o[k] for n, o in zip(weight, own)) / sum(weight) for k in server}  # type: ignore[misc]
    return {k: v for k, v in server.items() if personal not in k}, own


@each("executor", ["loop", "vmap"])
@each("name", ["shared", "fedsa", "ffa"])
def test_variants(name: str, executor: str) -> None:
    model, personal = adapted(), "lora_B" if name == "fedsa" else "nothing"
    if name == "ffa":
        model = pt.models.freeze(model, "*lora_A*")
    method = pt.fedsim(personal="*lora_B*", lr=LR) if name == "fedsa" else pt.fedavg(lr=LR)
    run = federate(model, method, executor=executor)
    shared, own = plainly(model, personal)
    assert run.shared.keys() == shared.keys()
    for key, value in run.shared.items():
        torch.testing.assert_close(value, shared[key], rtol=1e-3, atol=1e-5)
    for client, tensors in enumerate(own):
        for key, value in run.client(client).personal.items():
            torch.testing.assert_close(value, tensors[key], rtol=1e-3, atol=1e-5)


def test_perplexity_is_that_of_the_models_own_loss() -> None:
    model = adapted()
    for settings in ({}, {"loss": "next_token"}):
        run = federate(model, pt.fedavg(lr=LR), **settings)
        served = run.model()
        for client in range(len(SIZES)):
            x, y = text().client(client, "test")
            with torch.no_grad():
                expected = float(served(**x, labels=y).loss.exp())
            assert run.scores("global")[client] == pytest.approx(expected, rel=1e-4)


@each("tuner", ["prompts", "prefixes"])
def test_prompts_are_trained_and_scored(tuner: str) -> None:
    run = federate(adapted(TUNERS[tuner][0]()), pt.fedavg(lr=LR))
    served = run.model()
    x, y = text().client(1, "test")
    with torch.no_grad():
        expected = float(served(**x, labels=y).loss.exp())
    assert run.scores("global")[1] == pytest.approx(expected, rel=1e-4)


# ---- devices


@each("executor", ["loop", "vmap"])
def test_ranks_of_devices(executor: str, tmp_path: Path) -> None:
    kinds = ("strong", "weak", "weak")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
        r=RANK,
        lora_alpha=6,
        rank_pattern={"v_proj": 2},
    )
    model = adapted(config)
    ranks = pt.capacity.rank({"strong": RANK, "weak": 1}, kinds)
    run = federate(model, pt.fedavg(lr=LR), executor=executor, capacity=ranks)
    whole, x = run.model(), text().client(1, "test")[0]
    for name, p in whole.named_parameters():  # what a weak client has is the whole model with zeros
        if "lora_A" in name:
            p.data[1:] = 0
    weak = run.client(1).model()
    with torch.no_grad():
        expected, output = whole(**x).logits, weak(**x).logits
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-5)
        weak.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(base(), tmp_path)
        torch.testing.assert_close(again.eval()(**x).logits, output, rtol=1e-4, atol=1e-6)
    assert model.peft_config["default"].r == RANK
    assert again.peft_config["default"].r == 1


# ---- after training


def test_a_clients_model_is_saved_and_generates(tmp_path: Path) -> None:
    run = federate(adapted(), pt.fedsim(personal="*lora_B*", lr=LR), out=tmp_path / "run")
    model = run.client(1).model()
    assert isinstance(model, peft.PeftModel)
    model.save_pretrained(tmp_path / "adapter")
    saved = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= saved
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 20_000  # and no base
    x = text().client(1, "test")[0]
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    loaded = pt.load(tmp_path / "run", model=adapted()).client(1).model()
    with torch.no_grad():
        output = model(**x).logits
        torch.testing.assert_close(again(**x).logits, output)
        torch.testing.assert_close(loaded(**x).logits, output)
        assert not torch.allclose(run.client(0).model()(**x).logits, output)
    prompt = x["input_ids"][:1, :4]
    words = model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
    assert words.shape[1] > prompt.shape[1]
    assert torch.equal(words, again.generate(input_ids=prompt, max_new_tokens=5, do_sample=False))
    merged = copy.deepcopy(model).merge_and_unload()  # it writes into the base, which all clients share
    with torch.no_grad():
        torch.testing.assert_close(merged(**x).logits, output, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(run.client(1).model()(**x).logits, output)


def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of them do nothing without peft, which the tests of the other documents lack."""
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "lora.md"
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            exec(compile(block, str(page), "exec", dont_inherit=True), names)
    assert (tmp_path / "ann" / "adapter_config.json").is_file()


def test_the_example_on_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    letters = {chr(code): code - 32 for code in range(32, 127)}
    by_letter = tokenizers.Tokenizer(tokenizers.models.WordLevel({**letters, "?": 31}, unk_token="?"))
    by_letter.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    by_letter.decoder = tokenizers.decoders.Fuse()
    checkpoint = tmp_path / "checkpoint"
    transformers.PreTrainedTokenizerFast(tokenizer_object=by_letter).save_pretrained(checkpoint)
    model = base()
    model.resize_token_embeddings(95)
    model.save_pretrained(checkpoint)
    monkeypatch.delenv("PARTITA_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    short = f"--checkpoint {checkpoint} --rounds 1 --authors 2 --length 32 --rank 2 --method ditto"
    monkeypatch.setattr("sys.argv", ["lora.py", *short.split()])
    names = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "lora.py"))
    said = capsys.readouterr().out
    assert "perplexity" in said
    assert "author 1: The " in said
    for client, score in enumerate(names["run"].scores("personal")):
        plain = names["perplexity"](names["run"].client(client).model(), client)
        assert score == pytest.approx(plain, rel=1e-4)
    kept = peft.PeftModel.from_pretrained(
        type(model).from_pretrained(checkpoint), tmp_path / "runs/lora/adapter"
    )
    assert names["perplexity"](kept.eval(), 0) == pytest.approx(names["run"].scores("personal")[0], rel=1e-4)


def test_a_run_is_saved_and_goes_on(tmp_path: Path) -> None:
    method = pt.ditto(lr=LR, lam=0.3)
    straight = federate(adapted(), method, rounds=4)
    federate(adapted(), method, rounds=2, out=tmp_path / "run")
    further = federate(adapted(), method, rounds=4, out=tmp_path / "run", resume=True)
    for client in range(len(SIZES)):
        one, other = (run.client(client).personal for run in (straight, further))
        assert all(torch.equal(one[k], other[k]) for k in one)
    straight.save(tmp_path / "saved")
    read = pt.load(tmp_path / "saved", model=adapted())
    assert all(torch.equal(read.client(2).personal[k], v) for k, v in straight.client(2).personal.items())
