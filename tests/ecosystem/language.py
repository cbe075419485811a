"""Models of transformers and peft, small and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from samples import CLASSES, END, VOCABULARY, Foreign, images, lists, sound, text


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


def _checkpointed(base: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = base()
        model.gradient_checkpointing_enable()
        return model

    return build


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


CAUSAL = {"loss": "model"}
LANGUAGE: dict[str, Foreign] = {
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
    "BERT, tokens in lists, its own loss": Foreign(
        "transformers",
        _transformers("BertForTokenClassification", "BertConfig", **BERT),
        lists("tokens"),
        {"loss": "model"},
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
    "T5, from text to text in lists": Foreign(
        "transformers", _transformers("T5ForConditionalGeneration", "T5Config", **T5), lists("causal"), CAUSAL
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
    "LoRA on Llama, checkpointed": Foreign(
        "peft",
        _checkpointed(_lora("LlamaForCausalLM", "LlamaConfig", "CAUSAL_LM", ["q_proj", "v_proj"], **LLAMA)),
        lists("causal"),
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
}
