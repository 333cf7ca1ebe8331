"""Causal language models as folders."""

import torch

VOCABULARY = 320


def config_of(kind, **more):
    from transformers import AutoConfig

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    if kind == "xlnet":
        sizes = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}
    if kind == "qwen2":  # with rows for more tokens than there are; transformers adds one to its tokenizers
        sizes |= {"tie_word_embeddings": True, "vocab_size": VOCABULARY + 16}
    ids = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return AutoConfig.for_model(kind, **(ids | sizes | more))


def saved(folder, kind, **more):
    """A tiny model with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(kind, **more)).save_pretrained(folder)
    return folder
