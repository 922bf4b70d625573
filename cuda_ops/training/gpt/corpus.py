"""The tokens that a run trains on and validates by, and what turns them into text."""

import zlib
from dataclasses import dataclass

import numpy as np

from ..._errors import UserError
from ...data.text import TRAIN_SHARE, BytePairs, Characters, Windows, read_text, read_tokens, shakespeare
from .settings import Settings, check_length

# Tokens that tell one corpus from another.
FINGERPRINT_TOKENS = 1 << 22


@dataclass(frozen=True)
class Corpus:
    train: Windows
    validation: Windows
    tokenizer: Characters | BytePairs | None
    name: str

    @property
    def fingerprint(self) -> list[int]:
        """What a checkpoint knows its corpus by."""
        first = np.ascontiguousarray(self.train.tokens[:FINGERPRINT_TOKENS])
        return [len(self.train.tokens), zlib.crc32(first.astype("<u2").tobytes())]


def corpus(settings: Settings) -> Corpus:
    """The corpus that the settings name: a file of tokens, or a text, by characters or by GPT-2's byte pairs.

    Raises:
        UserError: it cannot be read, is too short, or has tokens that the model does not know.
    """
    config, tokenizer = settings.recipe.config, None
    if settings.tokens:
        tokens, name = read_tokens(settings.tokens, config.vocab_size), settings.tokens.name
    else:
        text = read_text(settings.text) if settings.text else shakespeare(settings.data_root)
        name = settings.text.name if settings.text else "tiny Shakespeare"
        tokenizer = Characters.of(text) if settings.of_characters else BytePairs()
        if settings.of_characters and len(tokenizer) != config.vocab_size:
            raise UserError(
                f"{name} has {len(tokenizer)} different characters, and the model knows {config.vocab_size}"
            )
        tokens = np.array(tokenizer.encode(text), dtype="<u2")
    if settings.val_tokens:
        train, validation = tokens, read_tokens(settings.val_tokens, config.vocab_size)
    else:
        middle = int(TRAIN_SHARE * len(tokens))
        train, validation = tokens[:middle], tokens[middle:]
    length = settings.recipe.length
    for part, what in ((train, "training"), (validation, "validation")):
        check_length(settings.recipe, len(part), what)
    return Corpus(
        Windows(train, length, settings.device), Windows(validation, length, settings.device), tokenizer, name
    )


def vocabulary_size(settings: Settings) -> int | None:
    """How many characters a text of the user's has, where the model is one of characters; else None."""
    return len(Characters.of(read_text(settings.text))) if settings.text and settings.of_characters else None
