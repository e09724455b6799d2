"""What the API says of its server: the model's name, age and limits, and a fingerprint of what its answers depend on."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass

from hisparse import __version__
from hisparse.config import HiSparseConfig, model_path, model_shape, served_name
from hisparse.errors import ConfigError
from hisparse.serve.responses import ModelCard


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Equal in every ingress replica of one application, if the checkpoint is on each of their nodes or on none.

    Attributes:
        created: when the checkpoint was written, else when this process began; seconds since 1970.
        vocab_size: None = the checkpoint is not on this node (the engines know it).
        fingerprint: "fp_" and ten digits; same seed and same fingerprint give the same tokens.
    """

    model: str
    max_model_len: int
    created: int
    fingerprint: str
    vocab_size: int | None = None

    @classmethod
    def of(cls, config: HiSparseConfig) -> ServerFacts:
        """Raises ConfigError when there is neither a name nor a checkpoint."""
        source = [__version__, config.model.model_dump(), config.cache.row_format, config.cache.indexer_dtype,
                  config.tensor_parallel_size]
        created, vocab_size = int(time.time()), None
        try:
            file = model_path(config.model) / "config.json"
            created, vocab_size = int(file.stat().st_mtime), model_shape(config.model).vocab_size
            source.append(file.read_text())
        except (ConfigError, OSError):
            pass  # an ingress may run on a node without the checkpoint
        digest = hashlib.sha256(json.dumps(source).encode()).hexdigest()
        return cls(model=served_name(config.model), max_model_len=config.model.max_model_len, created=created,
                   fingerprint=f"fp_{digest[:10]}", vocab_size=vocab_size)

    @property
    def card(self) -> ModelCard:
        return ModelCard(id=self.model, object="model", created=self.created, owned_by="hisparse",
                         max_model_len=self.max_model_len)
