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
    double    whether it is compared in double precision: norms over a few small samples let roundings
              grow until single precision cannot tell
    """

    package: str
    build: Callable[[], nn.Module]
    samples: Callable[[], pt.FederatedData]
    settings: dict[str, Any] = {}  # noqa: RUF012
    double: bool = False


def _federated(x: Any, y: np.ndarray) -> pt.FederatedData:
    """Return samples of clients of different sizes, so that some batches are short."""
    client = np.repeat(np.arange(CLIENTS), PER_CLIENT)
    test = np.tile(np.arange(PER_CLIENT) >= PER_CLIENT - 2, CLIENTS)
    keep = np.ones(len(client), dtype=bool)
    keep[:2] = False
    if isinstance(x, dict):
        x = {name: values[keep] for name, values in x.items()}
    else:
        x = tuple([values[keep] for values in x]) if isinstance(x, tuple) else x[keep]
    return pt.data.from_arrays(x, y[keep], client[keep], test=test[keep], validation=0)


def images(size: int, name: str = "", dense: bool = False) -> Callable[[], pt.FederatedData]:
    """Return images of random numbers in three classes, or with a class for each pixel."""

    def make() -> pt.FederatedData:
        rng = np.random.default_rng(0)
        n = CLIENTS * PER_CLIENT
        x = rng.normal(size=(n, 3, size, size)).astype(np.float32)
        y = rng.integers(0, CLASSES, (n, size, size) if dense else n)
        return _federated({name: x} if name else x, y)

    return make


def vectors(*shape: int, inputs: int = 1) -> Callable[[], pt.FederatedData]:
    """Return random numbers in three classes, for models with one input or several."""

    def make() -> pt.FederatedData:
        rng = np.random.default_rng(0)
        n = CLIENTS * PER_CLIENT
        x = tuple([rng.normal(size=(n, *shape)).astype(np.float32) for _ in range(inputs)])
        return _federated(x if inputs > 1 else x[0], rng.integers(0, CLASSES, n))

    return make


END = 2  # the token at the end of a text


def text(kind: str = "classes") -> Callable[[], pt.FederatedData]:
    """Return tokens with an attention mask: in three classes, to be continued, or each in a class."""

    def make() -> pt.FederatedData:
        rng = np.random.default_rng(0)
        n = CLIENTS * PER_CLIENT
        ids = rng.integers(5, VOCABULARY, (n, LENGTH))
        length = rng.integers(LENGTH // 2, LENGTH + 1, n)
        ids[np.arange(n), length - 1] = END
        real = np.arange(LENGTH) < length[:, None]
        ids = np.where(real, ids, 0)
        x = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
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


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(32, 8, 2, 4, 16, 32, 0.1, 0.1, CLASSES)
    nn.init.normal_(model.heads.head.weight)  # zeros, by which nothing before it would move in the first step
    return model


def _swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    torch.manual_seed(0)
    return SwinTransformer([2, 2], 12, [2, 2], [2, 2], [4, 4], num_classes=CLASSES, stochastic_depth_prob=0.3)


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    torch.manual_seed(0)
    blocks = [CNBlockConfig(12, 24, 2), CNBlockConfig(24, None, 2)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.3, layer_scale=0.1, num_classes=CLASSES)


def _lraspp() -> nn.Module:
    from torchvision.models import segmentation

    torch.manual_seed(0)
    return segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES, width_mult=0.25
    )


def _mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    torch.manual_seed(0)
    return MlpMixer(
        CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=16, drop_rate=0.1, drop_path_rate=0.2
    )


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


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_ff": 32,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 2,
    "use_cache": False,
    "eos_token_id": END,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
AUDIO: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "num_labels": CLASSES,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}


def sound() -> pt.FederatedData:
    """Return waves of random numbers in three classes."""
    rng = np.random.default_rng(0)
    n = CLIENTS * PER_CLIENT
    x = rng.normal(size=(n, 200)).astype(np.float32)
    return _federated({"input_values": x}, rng.integers(0, CLASSES, n))


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


def _seeded(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind(*args, **options)

    return build


class Encoder(nn.Module):
    """nn.TransformerEncoder with a head, samples first or, as is torch's default, second."""

    def __init__(self, samples_first: bool) -> None:
        super().__init__()
        self.first = samples_first
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=samples_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=samples_first)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1) if self.first else self.encoder(x.transpose(0, 1)).mean(0))


class Pair(nn.Module):
    """nn.Transformer: two inputs, of which one attends to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.head(self.transformer(source, target).mean(1))


class Attention(nn.Module):
    """nn.MultiheadAttention, whose output is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attended, weights = self.attention(x, x, x)
        return self.head(attended.mean(1)), weights


class Recurrent(nn.Module):
    """An LSTM or a GRU that returns its states too."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 8, batch_first=True, num_layers=2, dropout=0.2, **options)
        self.head = nn.Linear(16 if self.rnn.bidirectional else 8, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        states, last = self.rnn(x)
        return self.head(states[:, -1]), last


CAUSAL = {"loss": "model"}
MODELS: dict[str, Foreign] = {
    # torchvision
    "resnet18": Foreign("torchvision", _torchvision("resnet18"), images(32), double=True),
    "mobilenet_v3_small": Foreign("torchvision", _torchvision("mobilenet_v3_small"), images(32), double=True),
    "efficientnet_b0": Foreign("torchvision", _torchvision("efficientnet_b0"), images(32), double=True),
    "densenet121": Foreign("torchvision", _torchvision("densenet121"), images(32), double=True),
    "squeezenet1_1": Foreign("torchvision", _torchvision("squeezenet1_1"), images(32)),
    "shufflenet_v2_x0_5": Foreign("torchvision", _torchvision("shufflenet_v2_x0_5"), images(32), double=True),
    "convnext": Foreign("torchvision", _convnext, images(32)),
    "regnet_x_400mf": Foreign("torchvision", _torchvision("regnet_x_400mf"), images(32), double=True),
    "googlenet": Foreign(
        "torchvision", _torchvision("googlenet", init_weights=False), images(32), double=True
    ),
    "vit": Foreign("torchvision", _vit, images(32)),
    "swin": Foreign("torchvision", _swin, images(32)),
    "lraspp": Foreign("torchvision", _lraspp, images(32, dense=True), double=True),
    # timm
    "timm resnet18": Foreign("timm", _timm("resnet18"), images(32), double=True),
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
    "timm mixer": Foreign("timm", _mixer, images(32)),
    "timm efficientnet_lite0": Foreign(
        "timm", _timm("efficientnet_lite0", drop_path_rate=0.2), images(32), double=True
    ),
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
        images(32, "pixel_values"),
    ),
    "T5, from text to text": Foreign(
        "transformers", _transformers("T5ForConditionalGeneration", "T5Config", **T5), text("causal"), CAUSAL
    ),
    "T5, classes": Foreign(
        "transformers",
        _transformers("T5ForSequenceClassification", "T5Config", **T5, num_labels=CLASSES),
        text(),
    ),
    "ModernBERT": Foreign(
        "transformers",
        _transformers(
            "ModernBertForSequenceClassification",
            "ModernBertConfig",
            **{**BERT, **TOKENS, "local_attention": 4},
        ),
        text(),
    ),
    "DeBERTa": Foreign(
        "transformers",
        _transformers(
            "DebertaV2ForSequenceClassification", "DebertaV2Config", **BERT, relative_attention=True
        ),
        text(),
    ),
    "Gemma 2": Foreign(
        "transformers",
        _transformers("Gemma2ForCausalLM", "Gemma2Config", **LLAMA, head_dim=4, sliding_window=4),
        text("causal"),
        CAUSAL,
    ),
    "Mamba": Foreign(
        "transformers",
        _transformers(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            state_size=4,
            use_cache=False,
            **TOKENS,
        ),
        text("causal"),
        CAUSAL,
    ),
    "Wav2Vec2": Foreign(
        "transformers", _transformers("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **AUDIO), sound
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
    "TransformerEncoder": Foreign("torch.nn", _seeded(Encoder, True), vectors(5, 16)),
    "TransformerEncoder, samples second": Foreign("torch.nn", _seeded(Encoder, False), vectors(5, 16)),
    "Transformer": Foreign("torch.nn", _seeded(Pair), vectors(5, 16, inputs=2)),
    "MultiheadAttention": Foreign("torch.nn", _seeded(Attention), vectors(5, 16)),
    "LSTM": Foreign("torch.nn", _seeded(Recurrent, nn.LSTM), vectors(5, 6)),
    "GRU": Foreign("torch.nn", _seeded(Recurrent, nn.GRU, bidirectional=True), vectors(5, 6)),
}
