"""Prompt features from the hidden states of a language model, for families whose text encoder is one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def render(tokenizer: Any, conversation: list[dict[str, Any]], **template: Any) -> str:
    """The text that the chat template makes of a conversation."""
    return tokenizer.apply_chat_template(conversation, tokenize=False, **template)


def tokenize(tokenizer: Any, texts: list[str], length: int, **how: Any) -> tuple[Tensor, Tensor]:
    """Token ids and mask, each (B, length): cut and padded on the tokenizer's side, unless `how` says otherwise."""
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt", **how)
    return tokens.input_ids, tokens.attention_mask


@torch.no_grad()
def stacked_states(
    encoder: Callable[..., Any], ids: Tensor, mask: Tensor, layers: tuple[int, ...], position_ids: Tensor | None = None
) -> Tensor:
    """The hidden states of `layers` side by side: ids (B, L) -> (B, L, len(layers) * D), the first layer first."""
    states = encoder(
        input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False, output_hidden_states=True
    ).hidden_states
    return torch.cat([states[layer] for layer in layers], dim=-1)
