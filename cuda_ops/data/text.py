"""Texts and files of tokens for language models, and their batches."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .._errors import UserError
from .mnist import default_root

SHAKESPEARE = Path("tinyshakespeare") / "input.txt"
# The first part of a text is to train on, the rest to validate, as in nanoGPT.
TRAIN_SHARE = 0.9
MAGIC, VERSION, HEADER_INTS = 20240520, 1, 256
"""Of llm.c's token files: 256 int32 (magic number, version, count of tokens, zeros), then the tokens as uint16."""
# Tokens of a file that are checked at a time.
CHECKED_AT_ONCE = 1 << 22


def shakespeare(root=None) -> str:
    """Tiny Shakespeare: 1,115,394 characters of his plays.

    Args:
        root: the folder that holds tinyshakespeare/input.txt; default: `data` of the repository.

    Raises:
        UserError: the file is missing, or is no text.
    """
    path = (default_root("tinyshakespeare") if root is None else Path(root)) / SHAKESPEARE
    if not path.is_file():
        raise UserError(
            f"data file {path} is missing: copy it from data/tinyshakespeare of the cuda_ops repository, or give the "
            "folder above tinyshakespeare/ as --data-dir, or another text as --text"
        )
    return read_text(path)


def read_text(path) -> str:
    """The text of a file in UTF-8.

    Raises:
        UserError: it cannot be read, or is no such text, or empty.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"text file {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"text file {path} is no text in UTF-8 (byte {error.start}); tokens go by --tokens") from error
    if not text:
        raise UserError(f"text file {path} is empty")
    return text


class Characters:
    """A tokenizer by characters: a token is a character's place among those that a text has, in their order.

    Args:
        characters: what there is, each once.

    Example:
        >>> characters = Characters.of("abacus")
        >>> characters.encode("cab"), characters.decode([4, 3, 0])
        ([2, 0, 1], 'usa')
    """

    def __init__(self, characters: str):
        self.characters = characters
        self._numbers = {character: number for number, character in enumerate(characters)}

    @classmethod
    def of(cls, text: str) -> "Characters":
        return cls("".join(sorted(set(text))))

    def __len__(self):
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        """Raises KeyError where the text has a character that there is not."""
        return [self._numbers[character] for character in text]

    def decode(self, tokens) -> str:
        return "".join(self.characters[token] for token in tokens)


class BytePairs:
    """GPT-2's tokenizer, of the package tiktoken, which fetches its table on first use.

    Raises:
        UserError: the package is missing, or the table cannot be had.
    """

    def __init__(self):
        try:
            import tiktoken

            self._encoding = tiktoken.get_encoding("gpt2")
        except ImportError as error:
            cure = 'run `pip install "cuda_ops[gpt2]"`, or give a file of tokens by --tokens'
            raise UserError(f"GPT-2's tokenizer needs the package tiktoken: {cure}") from error
        except Exception as error:  # whatever its download comes up with
            raise UserError(
                f"tiktoken cannot get GPT-2's table ({error}): give a file of tokens by --tokens"
            ) from error

    def __len__(self):
        return self._encoding.n_vocab

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, tokens) -> str:
        return self._encoding.decode([token for token in tokens if token < len(self)])


def read_tokens(path, vocab_size: int) -> np.ndarray:
    """The tokens of a file of llm.c's, as a memory map: nothing is read but what is used.

    Args:
        path: of the file.
        vocab_size: what the tokens have to be below; all of them are looked at once.

    Raises:
        UserError: it cannot be read, is no such file, is damaged, or has a token of another vocabulary.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            head = file.read(4 * HEADER_INTS)
            size = os.fstat(file.fileno()).st_size
        if len(head) < 4 * HEADER_INTS:
            raise UserError(f"token file {path}: it has {size} bytes, and the header of llm.c's token files alone 1024")
        magic, version, count = np.frombuffer(head, "<i4")[:3].tolist()
        if magic != MAGIC:
            raise UserError(f"token file {path} is none of llm.c's: it begins with {magic}, expected {MAGIC}")
        if version != VERSION:
            raise UserError(f"token file {path}: expected version {VERSION} (uint16), got {version}")
        expected = 4 * HEADER_INTS + 2 * count
        if count < 1 or size != expected:
            raise UserError(
                f"token file {path} is damaged or truncated: its header counts {count} tokens, which take {expected} "
                f"bytes, and it has {size}"
            )
        tokens = np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER_INTS, shape=(count,))
    except OSError as error:
        raise UserError(f"token file {path} cannot be read ({error.strerror or error})") from error
    if vocab_size < 2**16:
        for begin in range(0, count, CHECKED_AT_ONCE):
            largest = int(tokens[begin : begin + CHECKED_AT_ONCE].max())
            if largest >= vocab_size:
                raise UserError(
                    f"token file {path} has token {largest}, and the model knows {vocab_size}: it is of another "
                    "vocabulary (see --model)"
                )
    return tokens


def write_tokens(path, tokens):
    """Writes a token file of llm.c's, whole or not at all.

    Args:
        path: of the file.
        tokens: integers from 0 to 65535.
    """
    from .._files import write_file

    tokens = np.asarray(tokens)
    if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < 2**16):
        raise ValueError("write_tokens: expected tokens from 0 to 65535, which the file's uint16 hold")
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    write_file(Path(path), header.tobytes() + tokens.astype("<u2").tobytes())


@dataclass(frozen=True)
class Windows:
    """Stretches of a sequence of tokens, each with the tokens that follow it by one.

    Args:
        tokens: an int array or a memory map of one dimension.
        length: of a stretch.
        device: where they go.

    Example:
        >>> inputs, targets = Windows(torch.arange(10).numpy(), 4)(torch.tensor([0, 5]))
        >>> inputs.tolist(), targets.tolist()
        ([[0, 1, 2, 3], [5, 6, 7, 8]], [[1, 2, 3, 4], [6, 7, 8, 9]])
    """

    tokens: np.ndarray
    length: int
    device: torch.device | str = "cpu"

    def __len__(self):
        """How many stretches there are, which may overlap."""
        return max(0, len(self.tokens) - self.length)

    def __call__(self, begins: Tensor) -> tuple[Tensor, Tensor]:
        """(inputs, targets), int64, (len(begins), length), on the device."""
        rows = [self.tokens[begin : begin + self.length + 1] for begin in begins.tolist()]
        both = torch.from_numpy(np.stack(rows).astype(np.int64))
        inputs, targets = both[:, :-1].contiguous(), both[:, 1:].contiguous()
        if torch.device(self.device).type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def begins_in_order(self, batch: int, most: int | None = None) -> tuple[Tensor, ...]:
        """Where the stretches of each batch begin that follow each other without a gap, at most `most` tokens (and at
        least one batch)."""
        begins = torch.arange(0, len(self), self.length)
        if most is not None:
            begins = begins[: max(batch, most // self.length)]
        return begins.split(batch)

    def in_order(self, batch: int, most: int | None = None):
        """The batches that begin there."""
        yield from map(self, self.begins_in_order(batch, most))
