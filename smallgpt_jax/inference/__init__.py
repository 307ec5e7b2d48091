"""Text generation with a trained model: `load(workdir).generate(prompt)`."""

from smallgpt_jax.inference.detokenizer import Detokenizer
from smallgpt_jax.inference.loading import (
    TrainedModel,
    build_text_model,
    find_chat_template,
    load,
    load_trained,
    portable_chat_template,
    require_next_tokens,
    select_paths,
)
from smallgpt_jax.inference.text_model import Chat, Conversation, TextModel

__all__ = [
    "Chat",
    "Conversation",
    "Detokenizer",
    "TextModel",
    "TrainedModel",
    "build_text_model",
    "find_chat_template",
    "load",
    "load_trained",
    "portable_chat_template",
    "require_next_tokens",
    "select_paths",
]
