"""Training data of the recall checkpoint: text that ships with Python, planted facts, many questions.

Everything comes from the running interpreter: library sources and the topics of `help()`. The modules that
`hisparse.testing.recall_documents` builds its documents from are left out, so documents made there are fresh text.
"""

from __future__ import annotations

import functools
import pathlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import IterableDataset, get_worker_info

from hisparse.testing.recall_documents import ATTRIBUTES, FACT_FORMS, HELD_OUT_MODULES, NAMES, QUESTION_FORMS

SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
EOS_ID = 1

# Roles of a token as a prediction target.
ROLE_IGNORED, ROLE_TEXT, ROLE_DIGIT, ROLE_FRAME = range(4)
"""A fact's digits cannot be predicted; an answer's four digits must be; its blank and <eos> frame them."""

TOKENS_PER_FACT = 64
MAX_FACTS = 48
MAX_QUESTIONS = 72


def training_texts() -> list[str]:
    """The corpus, one string per source; the held-out modules are not in it."""
    from pydoc_data.topics import topics

    library = pathlib.Path(sysconfig.get_path("stdlib"))
    sources = [path for path in sorted(library.glob("*.py")) if path.stem not in HELD_OUT_MODULES]
    return ["\n\n".join(topics[key] for key in sorted(topics))] + [
        path.read_text(encoding="utf-8", errors="ignore") for path in sources
    ]


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with single digits, in which a name is one to three tokens."""
    rng = random.Random(0)
    forms = [
        rng.choice(FACT_FORMS + QUESTION_FORMS).format(attribute=rng.choice(ATTRIBUTES), name=name, value="")
        for name in NAMES
        for _ in range(60)
    ]
    names = [f" {name}" for name in NAMES] * 400
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["\n".join(texts)[:1_500_000], *forms, *names], trainer)
    return tokenizer


def prepare(directory: pathlib.Path, vocab_size: int, tokenizer_file: pathlib.Path | None) -> None:
    """Write `tokenizer.json` (trained, or copied from `tokenizer_file`) and `corpus.npz` into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = training_texts()
    if tokenizer_file is None:
        tokenizer = train_tokenizer(texts, vocab_size)
    else:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = np.concatenate([np.array(encoding.ids, np.int16) for encoding in tokenizer.encode_batch(texts)])
    starts_line = np.array([tokenizer.decode([i]).startswith("\n") for i in range(tokenizer.get_vocab_size())])
    np.savez_compressed(directory / "corpus.npz", ids=ids, line_starts=np.flatnonzero(starts_line[ids]))
    print(f"corpus: {len(ids):,} tokens from {len(texts)} sources, vocabulary {tokenizer.get_vocab_size()}")


@dataclass(frozen=True, slots=True)
class Piece:
    """A planted line: its tokens and their roles."""

    ids: np.ndarray
    roles: np.ndarray


class DocumentSampler:
    """Draws training documents: `[num_tokens]` ids and roles, from one random generator."""

    def __init__(self, directory: pathlib.Path, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        with np.load(directory / "corpus.npz") as corpus:
            self.corpus, self.line_starts = corpus["ids"], corpus["line_starts"]
        self.digit_ids = np.array([self.tokenizer.token_to_id(str(digit)) for digit in range(10)])
        self.is_digit = np.isin(np.arange(self.tokenizer.get_vocab_size()), self.digit_ids)
        self.template = functools.cache(self._template)

    def _template(self, form: str, attribute: str, name: str) -> np.ndarray:
        return np.array(self.tokenizer.encode("\n" + form.format(attribute=attribute, name=name, value="0000")).ids)

    def _fact(self, attribute: str, name: str, digits: np.ndarray) -> Piece:
        ids = self.template(FACT_FORMS[self.rng.integers(len(FACT_FORMS))], attribute, name).copy()
        ids[self.is_digit[ids]] = digits
        return Piece(ids, np.where(self.is_digit[ids], ROLE_IGNORED, ROLE_TEXT))

    def _question(self, attribute: str, name: str, digits: np.ndarray) -> Piece:
        form = QUESTION_FORMS[self.rng.integers(len(QUESTION_FORMS))] + " {value}"
        ids = self.template(form, attribute, name).copy()
        ids[self.is_digit[ids]] = digits
        roles = np.where(self.is_digit[ids], ROLE_DIGIT, ROLE_TEXT)
        roles[-5] = ROLE_FRAME  # the blank before the digits
        return Piece(np.append(ids, EOS_ID), np.append(roles, ROLE_FRAME))

    def _attributes(self, count: int) -> list[str]:
        """Mostly one or two attributes a document: else attributes, not names, would identify the facts."""
        pool = self.rng.permutation(len(ATTRIBUTES))[: self.rng.choice([1, 2, len(ATTRIBUTES)], p=[0.5, 0.3, 0.2])]
        return [ATTRIBUTES[i] for i in self.rng.choice(pool, count)]

    def document(self, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """One document of exactly `num_tokens`; a question always follows the fact it asks for.

        Questions are drawn with replacement: else the last ones could be answered by elimination.
        """
        rng = self.rng
        most = min(MAX_FACTS, num_tokens // TOKENS_PER_FACT)
        num_facts = max(2, int(most * rng.uniform(0.4, 1.0)))
        num_questions = min(MAX_QUESTIONS, num_tokens // TOKENS_PER_FACT)
        names = [NAMES[i] for i in rng.choice(len(NAMES), num_facts, replace=False)]
        attributes = self._attributes(num_facts)
        digits = self.digit_ids[rng.integers(10, size=(num_facts, 4))]
        pieces = [self._fact(*fact) for fact in zip(attributes, names, digits, strict=True)]
        places = list(rng.uniform(0, 0.9, num_facts))  # as a share of the text; 1 is the end of it
        for asked in rng.integers(num_facts, size=num_questions):
            in_the_middle = rng.random() < 0.3
            places.append(rng.uniform(places[asked], 1) if in_the_middle else 1.0)
            pieces.append(self._question(attributes[asked], names[asked], digits[asked]))

        order = np.argsort(places, kind="stable")
        num_text = num_tokens - sum(len(piece.ids) for piece in pieces)
        first = int(rng.integers(len(self.corpus) - num_text))
        text = self.corpus[first : first + num_text]
        cuts = first + (np.array(places)[order] * num_text).astype(np.int64)
        lines = np.append(self.line_starts, len(self.corpus))
        cuts = np.minimum(lines[np.searchsorted(lines, cuts)], first + num_text) - first  # before a whole line
        ids, roles, done = [], [], 0
        for index, cut in zip(order, cuts, strict=True):
            ids += [text[done:cut], pieces[index].ids]
            roles += [np.full(cut - done, ROLE_TEXT), pieces[index].roles]
            done = cut
        ids.append(text[done:])
        roles.append(np.full(num_text - done, ROLE_TEXT))
        return np.concatenate(ids).astype(np.int64), np.concatenate(roles).astype(np.int64)

    def batch(self, num_documents: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """`[num_documents, num_tokens]` int64 ids and roles."""
        documents = [self.document(num_tokens) for _ in range(num_documents)]
        return np.stack([ids for ids, _ in documents]), np.stack([roles for _, roles in documents])


class Batches(IterableDataset):
    """Endless batches of `tokens_per_batch` tokens; each batch has one document length, drawn by weight."""

    def __init__(
        self,
        directory: pathlib.Path,
        lengths: Sequence[int],
        weights: Sequence[float],
        tokens_per_batch: int,
        seed: int,
    ) -> None:
        self.directory, self.lengths, self.tokens_per_batch, self.seed = directory, lengths, tokens_per_batch, seed
        self.shares = np.array(weights) / np.sum(weights)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        worker = get_worker_info()
        sampler = DocumentSampler(self.directory, seed=self.seed * 1_000 + (worker.id if worker else 0))
        while True:
            length = int(sampler.rng.choice(self.lengths, p=self.shares))
            yield sampler.batch(max(1, self.tokens_per_batch // length), length)
