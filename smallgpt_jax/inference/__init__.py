"""Text generation with a trained model.

model = inference.load("runs/pgpt-quickstart")
print(model.generate("def main(", temperature=0.5))
"""

from smallgpt_jax.inference.detokenizer import Detokenizer
from smallgpt_jax.inference.loading import (
    TrainedModel,
    build_text_model,
    find_chat_template,
    load,
    load_chat_template,
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
    "load_chat_template",
    "load_trained",
    "portable_chat_template",
    "require_next_tokens",
    "select_paths",
]
