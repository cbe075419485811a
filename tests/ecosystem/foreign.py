"""Models that Partita did not write: how each is made, small and random, and what samples it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import partita as pt

CLIENTS, PER_CLIENT, CLASSES = 4, 7, 3
VOCABULARY, LENGTH = 29, 12


class Foreign(NamedTuple):
    """A model of another package on samples that fit it.

    build     returns the model with random weights
    samples   returns the samples of a few clients
    settings  what a user must say beside model and data
    """

    package: str
    build: Callable[[], nn.Module]
    samples: Callable[[], pt.FederatedData]
    settings: dict[str, Any] = {}  # noqa: RUF012


def _federated(x: Any, y: np.ndarray) -> pt.FederatedData:
    client = np.repeat(np.arange(CLIENTS), PER_CLIENT)
    keep = np.ones(len(client), dtype=bool)
    keep[1], keep[2] = False, False  # clients of different sizes, so that some batches are short
    if isinstance(x, dict):
        from dataclasses import replace

        d = _federated(np.arange(len(client)).astype(np.int64), y)
        return replace(d, x={k: torch.as_tensor(v)[d.x] for k, v in x.items()})
    x = x[keep]
    test = np.tile(np.arange(PER_CLIENT) >= PER_CLIENT - 2, CLIENTS)[keep]
    return pt.data.from_arrays(x, y[keep], client[keep], test=test, validation=0)


def images(size: int, channels: int = 3) -> Callable[[], pt.FederatedData]:
    """Return images of random numbers in three classes."""

    def make() -> pt.FederatedData:
        rng = np.random.default_rng(0)
        n = CLIENTS * PER_CLIENT
        x = rng.normal(size=(n, channels, size, size)).astype(np.float32)
        return _federated(x, rng.integers(0, CLASSES, n))

    return make


def vectors(*shape: int, classes: int = CLASSES) -> Callable[[], pt.FederatedData]:
    """Return random numbers in three classes."""

    def make() -> pt.FederatedData:
        rng = np.random.default_rng(0)
        n = CLIENTS * PER_CLIENT
        return _federated(rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(0, classes, n))

    return make


def text(kind: str = "classes", mask: bool = True, prefix: str = "input") -> Callable[[], pt.FederatedData]:
    """Return token ids with an attention mask: in three classes, or to be continued, or with labelled tokens."""

    def make() -> pt.FederatedData:
        rng = np.random.default_rng(0)
        n = CLIENTS * PER_CLIENT
        ids = rng.integers(5, VOCABULARY, (n, LENGTH))
        length = rng.integers(LENGTH // 2, LENGTH + 1, n)
        real = np.arange(LENGTH) < length[:, None]
        ids = np.where(real, ids, 0)
        x = (
            {f"{prefix}_ids": ids, "attention_mask": real.astype(np.int64)}
            if mask
            else {f"{prefix}_ids": ids}
        )
        if kind == "classes":
            return _federated(x, rng.integers(0, CLASSES, n))
        y = ids if kind == "causal" else rng.integers(0, CLASSES, ids.shape)
        return _federated(x, np.where(real, y, -100))

    return make


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        torch.manual_seed(0)
        return torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)

    return build


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        torch.manual_seed(0)
        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)

    return build


def _transformers(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "num_labels": CLASSES,
}
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def _lora(model: str, config: str, task: str, targets: list[str], method: str = "LoraConfig", **options: Any):
    base = _transformers(model, config, **options)

    def build() -> nn.Module:
        import peft

        torch.manual_seed(1)
        kind = getattr(peft, method)
        rank = {"r": 4} if method != "IA3Config" else {}
        extra = {"feedforward_modules": []} if method == "IA3Config" else {}
        return peft.get_peft_model(base(), kind(task_type=task, target_modules=targets, **rank, **extra))

    return build


def _encoder() -> nn.Module:
    torch.manual_seed(0)

    class Encoder(nn.Module):
        """nn.TransformerEncoder with a token at the front, as its users write it."""

        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(x).mean(1))

    return Encoder()


class Attention(nn.Module):
    """nn.MultiheadAttention, whose output is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = (
            nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True),
            nn.Linear(16, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    """An LSTM or a GRU that returns its states too."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.head = kind(6, 8, batch_first=True, num_layers=2), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        states, last = self.rnn(x)
        return self.head(states[:, -1]), last


CAUSAL = {"loss": "model"}
MODELS: dict[str, Foreign] = {
    # torchvision
    "resnet18": Foreign("torchvision", _torchvision("resnet18"), images(32)),
    "mobilenet_v3_small": Foreign("torchvision", _torchvision("mobilenet_v3_small"), images(32)),
    "efficientnet_b0": Foreign("torchvision", _torchvision("efficientnet_b0"), images(32)),
    "densenet121": Foreign("torchvision", _torchvision("densenet121"), images(32)),
    "squeezenet1_1": Foreign("torchvision", _torchvision("squeezenet1_1"), images(32)),
    "shufflenet_v2_x0_5": Foreign("torchvision", _torchvision("shufflenet_v2_x0_5"), images(32)),
    "convnext_tiny": Foreign("torchvision", _torchvision("convnext_tiny"), images(32)),
    "regnet_x_400mf": Foreign("torchvision", _torchvision("regnet_x_400mf"), images(64)),
    "googlenet": Foreign("torchvision", _torchvision("googlenet", init_weights=False), images(64)),
    "vit_b_16": Foreign(
        "torchvision",
        lambda: __import__("torchvision").models.VisionTransformer(
            32, 8, 2, 4, 16, 32, num_classes=CLASSES, dropout=0.1, attention_dropout=0.1
        ),
        images(32),
    ),
    "swin_t": Foreign("torchvision", _torchvision("swin_t"), images(32)),
    # timm
    "timm resnet18": Foreign("timm", _timm("resnet18"), images(32)),
    "timm vit_tiny": Foreign(
        "timm",
        _timm(
            "vit_tiny_patch16_224",
            img_size=32,
            patch_size=8,
            embed_dim=16,
            depth=2,
            num_heads=2,
            drop_path_rate=0.2,
        ),
        images(32),
    ),
    "timm convnext_atto": Foreign("timm", _timm("convnext_atto", drop_path_rate=0.2), images(32)),
    "timm mixer": Foreign(
        "timm", _timm("mixer_s32_224", img_size=64, embed_dim=16, num_blocks=2), images(64)
    ),
    "timm efficientnet_lite0": Foreign("timm", _timm("efficientnet_lite0", drop_path_rate=0.2), images(32)),
    "timm swin_tiny": Foreign(
        "timm",
        _timm(
            "swin_tiny_patch4_window7_224",
            img_size=28,
            embed_dim=12,
            depths=(1, 1),
            num_heads=(2, 2),
            window_size=7,
        ),
        images(28),
    ),
    "timm deit3": Foreign(
        "timm",
        _timm("deit3_small_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2),
        images(32),
    ),
    # transformers
    "BERT": Foreign(
        "transformers", _transformers("BertForSequenceClassification", "BertConfig", **BERT), text()
    ),
    "DistilBERT": Foreign(
        "transformers",
        _transformers(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=VOCABULARY,
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=32,
            max_position_embeddings=32,
            num_labels=CLASSES,
        ),
        text(),
    ),
    "RoBERTa": Foreign(
        "transformers",
        _transformers("RobertaForSequenceClassification", "RobertaConfig", **{**BERT, "pad_token_id": 1}),
        text(),
    ),
    "ALBERT": Foreign(
        "transformers",
        _transformers("AlbertForSequenceClassification", "AlbertConfig", **BERT, embedding_size=8),
        text(),
    ),
    "ELECTRA": Foreign(
        "transformers",
        _transformers("ElectraForSequenceClassification", "ElectraConfig", **BERT, embedding_size=8),
        text(),
    ),
    "BERT, tokens": Foreign(
        "transformers", _transformers("BertForTokenClassification", "BertConfig", **BERT), text("tokens")
    ),
    "GPT-2": Foreign(
        "transformers",
        _transformers(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        ),
        text("causal"),
        CAUSAL,
    ),
    "Llama": Foreign(
        "transformers", _transformers("LlamaForCausalLM", "LlamaConfig", **LLAMA), text("causal"), CAUSAL
    ),
    "Mistral": Foreign(
        "transformers", _transformers("MistralForCausalLM", "MistralConfig", **LLAMA), text("causal"), CAUSAL
    ),
    "Qwen2": Foreign(
        "transformers", _transformers("Qwen2ForCausalLM", "Qwen2Config", **LLAMA), text("causal"), CAUSAL
    ),
    "OPT": Foreign(
        "transformers",
        _transformers(
            "OPTForCausalLM",
            "OPTConfig",
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=32,
            word_embed_proj_dim=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        ),
        text("causal"),
        CAUSAL,
    ),
    "ViT": Foreign(
        "transformers",
        _transformers(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=32,
            patch_size=8,
            num_labels=CLASSES,
        ),
        lambda: _named(images(32)(), "pixel_values"),
    ),
    "T5 encoder": Foreign(
        "transformers",
        _transformers(
            "T5ForSequenceClassification",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=16,
            d_ff=32,
            d_kv=8,
            num_layers=2,
            num_heads=2,
            num_labels=CLASSES,
            use_cache=False,
            eos_token_id=2,
            pad_token_id=0,
            decoder_start_token_id=0,
        ),
        lambda: _ending(text()()),
    ),
    # peft
    "LoRA on Llama": Foreign(
        "peft",
        _lora("LlamaForCausalLM", "LlamaConfig", "CAUSAL_LM", ["q_proj", "v_proj"], **LLAMA),
        text("causal"),
        CAUSAL,
    ),
    "LoRA on BERT": Foreign(
        "peft",
        _lora("BertForSequenceClassification", "BertConfig", "SEQ_CLS", ["query", "value"], **BERT),
        text(),
    ),
    "LoRA on GPT-2": Foreign(
        "peft",
        _lora(
            "GPT2LMHeadModel",
            "GPT2Config",
            "CAUSAL_LM",
            ["c_attn"],
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        ),
        text("causal"),
        CAUSAL,
    ),
    "IA3 on Llama": Foreign(
        "peft",
        _lora("LlamaForCausalLM", "LlamaConfig", "CAUSAL_LM", ["k_proj", "v_proj"], "IA3Config", **LLAMA),
        text("causal"),
        CAUSAL,
    ),
    # torch.nn
    "TransformerEncoder": Foreign("torch.nn", _encoder, vectors(5, 16)),
    "MultiheadAttention": Foreign("torch.nn", Attention, vectors(5, 16)),
    "LSTM": Foreign("torch.nn", lambda: Recurrent(nn.LSTM), vectors(5, 6)),
    "GRU": Foreign("torch.nn", lambda: Recurrent(nn.GRU), vectors(5, 6)),
}


def _named(data: pt.FederatedData, name: str) -> pt.FederatedData:
    from dataclasses import replace

    return replace(data, x={name: data.x})


def _ending(data: pt.FederatedData) -> pt.FederatedData:
    """Let each text end with the token of its end, as T5 wants it."""
    ids, mask = data.x["input_ids"].clone(), data.x["attention_mask"]
    ids[torch.arange(len(ids)), mask.sum(1) - 1] = 2
    from dataclasses import replace

    return replace(data, x={"input_ids": ids, "attention_mask": mask})
