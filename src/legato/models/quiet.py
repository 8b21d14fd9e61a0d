"""Third-party output that means nothing to a user, silenced in one place; errors pass."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# (logger, how the message starts, why it may go)
_NOISE = (
    # torchao looks for kernels of GPUs that this machine lacks; what needs them raises by itself.
    ("torchao", "Failed to load "),
    ("torchao.kernel.intmm", "Warning: Detected no triton"),
    # Rows are padded on the right, where a causal model can't look: no mask is needed.
    ("transformers.modeling_utils", "We strongly recommend passing in an `attention_mask`"),
    # torchao tells torch's developers about its own use of a deprecated function.
    ("torch.utils._pytree", "<enum '"),
)


class _DropMessages(logging.Filter):
    """Drops the warnings of one logger that start with ``start``; errors pass."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or not record.getMessage().startswith(self.start)


def silence_known_noise() -> None:
    """Drop the known warnings that importing transformers' models and peft writes to stderr.

    Call it before the first import of peft or of a model class. Calling it again changes nothing.
    """
    for name, start in _NOISE:
        logger = logging.getLogger(name)
        starts = [known.start for known in logger.filters if isinstance(known, _DropMessages)]
        if start not in starts:
            logger.addFilter(_DropMessages(start))
    # peft asks transformers by a name that transformers renamed.
    warnings.filterwarnings(
        "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
    )


@contextmanager
def without_weight_bars() -> Iterator[None]:
    """Hide transformers' progress bars and its table of missing keys, which Legato says itself."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reading
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    # A filter, not a level: transformers reads the level and says more when it is raised.
    modeling = logging.getLogger("transformers.modeling_utils")
    drop_all = _DropMessages("")
    modeling.addFilter(drop_all)
    transformers_logging.disable_progress_bar()
    # Its reader of GGUF takes tqdm's bar itself, which no setting of transformers reaches.
    gguf_bar = gguf_reading.tqdm
    gguf_reading.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        gguf_reading.tqdm = gguf_bar
        modeling.removeFilter(drop_all)
        if had_bars:
            transformers_logging.enable_progress_bar()
