"""A CLIPTokenizer whose byte-pair vocabulary is learnt from the captions, and captions assembled from phrases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer

from rocm_sd.models.emoji import COLOURS, POSITIONS, RECORDS_FILE, RELATIONS, SIZES, read_records

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from random import Random

__all__ = ["CONTEXT", "VOCABULARY", "PhraseTokens", "build_tokenizer"]

CONTEXT = 77
# Room for a token of its own for nearly every word of the names (about 2,300 of them).
VOCABULARY = 3072
_START, _END = "<|startoftext|>", "<|endoftext|>"


def _corpus(records: Path) -> list[str]:
    lines = [word for emoji in read_records(records) for word in (emoji.name, *emoji.aliases)]
    grammar = [*SIZES, *POSITIONS, *RELATIONS, *COLOURS, "a picture of an emoji", "the", "on with a background"]
    # Repeated, so that every word of the grammar outranks the rare words of names.
    return lines + grammar * 200


def build_tokenizer(folder: Path, records: Path = RECORDS_FILE) -> CLIPTokenizer:
    """Learns merges from names and grammar and saves the tokenizer in `folder`; the result is deterministic."""
    empty = CLIPTokenizer()
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.normalizer = empty.backend_tokenizer.normalizer
    learner.pre_tokenizer = empty.backend_tokenizer.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # As CLIP's own: every byte, every byte at a word's end, the merges, the two special tokens.
    fixed = [*alphabet, *(f"{letter}</w>" for letter in alphabet)]
    merges_wanted = VOCABULARY - len(fixed) - 2
    learner.train_from_iterator(
        _corpus(records),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY + len(alphabet),
            end_of_word_suffix="</w>",
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    learner.model.save(str(folder))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")][:merges_wanted]
    tokens = [*dict.fromkeys([*fixed, *("".join(pair) for pair in merges)]), _START, _END]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CONTEXT)
    tokenizer.save_pretrained(folder)
    # Also in CLIP's classic form, which every version of transformers reads.
    tokenizer.backend_tokenizer.model.save(str(folder))
    return tokenizer


class PhraseTokens:
    """Token ids of captions given as phrases: equal to the tokenizer's on the joined text."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        self.tokenizer = tokenizer
        self.start: int = tokenizer.bos_token_id
        self.end: int = tokenizer.eos_token_id
        # By word: there are tens of thousands of phrases but 2,900 words, so soon nothing is tokenized any more.
        self.known: dict[str, list[int]] = {}

    def _of(self, word: str) -> list[int]:
        ids = self.known.get(word)
        if ids is None:
            ids = self.known[word] = self.tokenizer(word, add_special_tokens=False)["input_ids"]
        return ids

    def row(self, phrases: Iterable[str]) -> list[int]:
        body = [token for phrase in phrases for word in phrase.split(" ") for token in self._of(word)][: CONTEXT - 2]
        return [self.start, *body, *[self.end] * (CONTEXT - 1 - len(body))]

    def batch(self, captions: list[list[str]], drop: float, random: Random) -> torch.Tensor:
        """[B, 77] int64; a share `drop` of the captions becomes "" for classifier-free guidance."""
        rows = [self.row([] if random.random() < drop else phrases) for phrases in captions]
        # By way of NumPy: for 256 rows 0.4 ms, where torch.tensor takes 3 ms on nested lists.
        return torch.from_numpy(np.array(rows, dtype=np.int64))
